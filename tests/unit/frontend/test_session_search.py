"""Searches the interleavings of the front end: choices sent by parts, outputs, readers that lag, clients that leave.

Each run is one seed. What a client is told is compared with what the outputs say, worked out from all tokens at once,
and the messages to the scheduler with the ends that they must have.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from engine.core.messages import Abort, ClientMessage, FinishReason, Generate, SamplingParams, TokenLogprob, TokenOutput
from engine.frontend.protocols.openai import shapes
from engine.frontend.protocols.openai.shapes import CompletionShape
from engine.frontend.sessions import sessions
from engine.frontend.sessions.requests import Order, rids_of, sampling_of
from engine.frontend.sessions.sessions import Session, Sessions, finished
from engine.frontend.text import answer
from engine.frontend.text.answer import Answer, StopScanner

SEEDS: Final = 150
ALPHABET: Final = ("a", "b", "c", "\u20ac")
STOPS: Final = ((), ("b",), ("ab", "c"), ("\u20aca",))


class Expected(NamedTuple):
    """The answer that a client must get for one choice."""

    ids: list[int]
    text: str
    reason: str


def expected_of(tokens: Sequence[int], sampling: SamplingParams) -> Expected:
    """The tokens up to the one with which a stop string ends, once as many are out as must be."""
    scanned_from = 0
    for count in range(1, len(tokens) + 1):
        text = bytes(tokens[:count]).decode(errors="ignore")
        if count < sampling.min_new_tokens:
            scanned_from = len(text)
            continue
        ends = [(at + len(stop), at) for stop in sampling.stop if (at := text.find(stop, scanned_from)) >= 0]
        if ends:
            return Expected(list(tokens[:count]), text[: min(ends)[1]], "stop")
    return Expected(list(tokens), bytes(tokens).decode(errors="replace"), "length")


class Run:
    """One answer from its first message to its end, by one seed."""

    def __init__(self, seed: int, tokenizer: Any) -> None:
        rng = self.rng = random.Random(seed)
        self.sent: list[ClientMessage] = []
        self.sessions = Sessions(self.sent.append)
        self.prompts = [[rng.randrange(97, 100) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 2))]
        self.n = rng.randint(1, 3)
        sampling = SamplingParams(
            stop=rng.choice(STOPS), min_new_tokens=rng.choice((0, 0, 2, 4)), seed=rng.choice((None, 7))
        )
        rids = rids_of("r", len(self.prompts) * self.n)
        messages = tuple(
            Generate(
                rid=rid,
                prompt_ids=tuple(self.prompts[number // self.n]),
                sampling=sampling_of(sampling, number % self.n),
                return_logprob=True,
            )
            for number, rid in enumerate(rids)
        )
        self.stream, self.echoes = rng.random() < 0.6, rng.random() < 0.5
        order = Order(
            rid="r",
            messages=messages,
            stream=self.stream,
            n=self.n,
            logprobs=True,
            include_usage=True,
            token_ids=True,
            echo=tuple(bytes(prompt).decode() for prompt in self.prompts) if self.echoes else (),
        )
        served: Any = SimpleNamespace(tokenizer=tokenizer, model_name="m")
        self.session = Session(self.sessions, order, CompletionShape(order, served), tokenizer)
        self.outputs = {rid: self._outputs(rid) for rid in rids}
        self.said: dict[str, list[int]] = {rid: [] for rid in rids}
        self.written = b""
        self.is_over = self.has_left = False

    def _outputs(self, rid: str) -> list[TokenOutput]:
        rng = self.rng
        tokens = list("".join(rng.choices(ALPHABET, k=rng.randint(1, 6))).encode())
        cached, found = rng.randint(0, 2), []
        while tokens:
            count = rng.randint(1, len(tokens))
            taken, tokens = tokens[:count], tokens[count:]
            logprobs = tuple(TokenLogprob(logprob=-float(token)) for token in taken)
            found.append(
                TokenOutput(
                    rid=rid, token_ids=tuple(taken), completion_tokens=1, cached_tokens=cached, logprobs=logprobs
                )
            )
        found[-1] = msgspec.structs.replace(found[-1], finish_reason=FinishReason.LENGTH)
        return found

    def go(self) -> None:
        more_to_send = True
        may_leave = self.rng.random() < 0.3
        while more_to_send or any(self.outputs.values()) or not (self.is_over or self.has_left):
            what = self.rng.random()
            if what < 0.3 and more_to_send and not self.has_left:
                more_to_send = self.session.send_some()
            elif what < 0.35 and may_leave and not self.is_over:
                self.session.abort()
                self.has_left = True
                more_to_send = False
                self.outputs = {rid: rest for rid, rest in self.outputs.items() if self._was_sent(rid)}
            elif what < 0.7:
                self._reply()
            elif not self.has_left and not self.is_over and not more_to_send and self.session.has_more:
                self._read()

    def _was_sent(self, rid: str) -> bool:
        return any(isinstance(message, Generate) and message.rid == rid for message in self.sent)

    def _reply(self) -> None:
        """The scheduler says the next of a request, or that it ended as it was told."""
        ready = [rid for rid, rest in self.outputs.items() if rest and self._was_sent(rid)]
        if not ready:
            return
        rid = self.rng.choice(ready)
        aborts = [one for one in self.sent if isinstance(one, Abort) and one.rid == rid]
        if aborts and self.rng.random() < 0.7:
            last = msgspec.structs.replace(self.outputs[rid][0], token_ids=(), logprobs=())
            output = msgspec.structs.replace(last, finish_reason=aborts[0].finish_reason)
            self.outputs[rid] = []
        else:
            output = self.outputs[rid].pop(0)
        self.said[rid] += output.token_ids
        self.sessions.take(output)

    def _read(self) -> None:
        if self.stream:
            self.written += self.session.part()
            self.is_over = self.session.is_told
        elif self.session.collect():
            self.written = finished(self.session.body())
            self.is_over = True

    def check(self) -> None:
        assert self.sessions.open_requests == 0
        # A stop string may have been found before the client left.
        aborts = [(message.rid, message.finish_reason) for message in self.sent if isinstance(message, Abort)]
        assert len(aborts) == len(set(aborts)), aborts
        if self.has_left:
            return
        expected = [self._expected(message) for message in self.session._order.messages]
        choices, usage = self._told()
        for index, one in enumerate(expected):
            echo = bytes(self.prompts[index // self.n]).decode() if self.echoes else ""
            assert choices[index]["text"] == echo + one.text
            assert choices[index]["ids"] == one.ids
            assert choices[index]["logprobs"] == [-float(token) for token in one.ids]
            assert choices[index]["reason"] == one.reason
            assert choices[index]["prompt"] == self.prompts[index // self.n]
        assert usage["prompt_tokens"] == sum(map(len, self.prompts))
        assert usage["completion_tokens"] == sum(len(one.ids) for one in expected)

    def _expected(self, message: Generate) -> Expected:
        return expected_of(self.said[message.rid], message.sampling)

    def _told(self) -> tuple[dict[int, dict[str, Any]], dict[str, Any]]:
        """Add up the events of a stream, or read the whole answer."""
        events = [json.loads(self.written)] if not self.stream else []
        if self.stream:
            lines = [line.removeprefix(b"data: ") for line in self.written.split(b"\n\n") if line]
            assert lines[-1] == b"[DONE]"
            events = [json.loads(line) for line in lines[:-1]]
        told: dict[int, dict[str, Any]] = {}
        for choice in [choice for event in events for choice in event["choices"]]:
            one = told.setdefault(
                choice["index"], {"text": "", "ids": [], "logprobs": [], "prompt": choice.get("prompt_token_ids")}
            )
            one["text"] += choice["text"]
            one["ids"] += choice["token_ids"]
            one["logprobs"] += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
            one["reason"] = choice["finish_reason"]
        return told, events[-1]["usage"]


@pytest.fixture(autouse=True)
def _small_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices are sent one or two at a time, and outputs are read a few at a time."""
    monkeypatch.setattr(sessions, "TOKENS_A_TURN", 3)
    monkeypatch.setattr(sessions, "OUTPUTS_A_TURN", 2)


def search(tokenizer: Any) -> None:
    for seed in range(SEEDS):
        run = Run(seed, tokenizer)
        run.go()
        run.check()


def test_every_interleaving_tells_the_client_what_the_outputs_say(byte_tokenizer: Any) -> None:
    """C03, C05, C07"""
    search(byte_tokenizer)


def _keeps_held_text(scanner: StopScanner) -> str:
    del scanner
    return ""


def _scans_at_once(self: Answer, text: str) -> str:
    return self._scanner.push(text)


def _aborts_twice(self: Sessions, request: Any, reason: FinishReason = FinishReason.ABORT) -> None:
    _abort(self, request, reason)
    _abort(self, request, reason)


def _of_all_tokens(ids: tuple[int, ...], logprobs: tuple[TokenLogprob | None, ...]) -> Any:
    return _logprobs((*ids, *ids)[: len(logprobs)], logprobs)


def _of_every_choice(self: shapes.Counts) -> Any:
    usage = _usage(self)
    return msgspec.structs.replace(usage, prompt_tokens=sum(one.prompt_tokens for one in self._last.values()))


def _echoes_always(self: CompletionShape, index: int, piece: Any, of_prompt: Any) -> Any:
    kept = dict(self._echo)
    choice = yield from _choice(self, index, piece, of_prompt)
    self._echo = kept
    return choice


def _first_prompt(self: CompletionShape, index: int, piece: Any, of_prompt: Any) -> Any:
    choice = yield from _choice(self, index, piece, of_prompt)
    if choice.prompt_token_ids is msgspec.UNSET:
        return choice
    return msgspec.structs.replace(choice, prompt_token_ids=self._prompt_ids[0])


def _of_the_next_choice(self: Session, index: int, output: Any) -> None:
    _take(self, (index + 1) % len(self._choices), output)


_abort, _logprobs, _usage = Sessions.abort, answer._logprobs, shapes.Counts.usage
_choice, _take = CompletionShape._choice, Session._take
# Faults of the front end, planted: the object, its name there, and what stands for it.
MUTANTS: Final[list[tuple[Any, str, Callable[..., Any]]]] = [
    (StopScanner, "flush", _keeps_held_text),
    (Answer, "_scan", _scans_at_once),
    (Sessions, "abort", _aborts_twice),
    (answer, "_logprobs", _of_all_tokens),
    (shapes.Counts, "usage", _of_every_choice),
    (CompletionShape, "_choice", _echoes_always),
    (CompletionShape, "_choice", _first_prompt),
    (Session, "_take", _of_the_next_choice),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant[2].__name__.strip("_"))
def test_the_search_finds_a_fault(
    byte_tokenizer: Any, mutant: tuple[Any, str, Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(*mutant)
    with pytest.raises(AssertionError):
        search(byte_tokenizer)
