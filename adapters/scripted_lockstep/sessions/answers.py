"""One reply of the front end under the search: its order, its client's input so far, and the expected reply.

The expected reply is computed from all tokens at once, without a session.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Final, Literal, NamedTuple

import msgspec

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FAILURES, FinishReason, Generate, PromptLogprob, SamplingParams, TokenLogprob
from engine.frontend.protocols.openai.chat_blocks import SpokenChoice
from engine.frontend.protocols.openai.requests import completion_order
from engine.frontend.protocols.openai.shapes import ChatShape, CompletionShape
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.requests import Order, sampling_of
from engine.frontend.sessions.sessions import Session, Sessions, Shape, finished
from engine.frontend.text.dialect import AnswerParser
from engine.frontend.text.reasoning import END, ReasoningSplitter, ReasoningStart
from engine.frontend.text.tools.families import FAMILIES
from scripted.core.violation import Violation
from scripted.sdk import Add

# The letter of a stop token. No other token has it, so a stop string is found only at this token.
_STOP_LETTER: Final = ord("z")
_STOPS: Final = ("z", "xz", "yyz")
# Stop strings of ordinary letters, which outputs often contain.
_USUAL_STOPS: Final = ("c", "bc", "ab")
# Stop strings of letters that no call contains.
_STOPS_BESIDE_CALLS: Final = ("y", "xy", "yx")
_LETTERS: Final = b"xyabc"
_BYTES: Final = 256
# A token whose text ends the reasoning and continues after it.
_END_OF_REASONING: Final = 300
# Two tokens whose texts are one call of a tool; a limit may cut the output between them.
_CALL: Final = (301, 302)
_CALL_TEXTS: Final = ('<tool_call>{"name": "add", "arguments": {"n": ', "1}}</tool_call>")
# The arguments of a call that was cut, and of a complete one.
_ARGUMENTS: Final = ('{"n": ', '{"n": 1}')
_TEXTS: Final = {
    _END_OF_REASONING: f"a{END}b".encode(),
    **{token: text.encode() for token, text in zip(_CALL, _CALL_TEXTS, strict=True)},
}
_TIERS: Final = ("device", "host")
_REPLACEMENT: Final = "\ufffd"


class SessionSettings(msgspec.Struct, frozen=True):
    """The fields of a client's request, and how it behaves.

    Every reply has ``n`` choices for each of its ``prompts``. A client reads in each ``lag``-th step with an event, and
    in all steps without one. A client that ``leaves`` hangs up instead of having an operator abort its request.
    ``turn_tokens`` and ``turn_outputs`` bound the tokens sent and the outputs read in a step. With ``stops`` all
    choices but the first have stop strings that their outputs often contain; with ``least`` these count from the token
    on that completes the first one. ``usage`` selects the token counts of a stream: none, at its end, or also in each
    event.
    """

    protocol: Literal["completions", "chat"] = "completions"
    stream: bool = True
    n: int = 2
    prompts: int = 1
    echo: bool = False
    logprobs: bool = True
    usage: Literal["end", "each", "none"] = "end"
    reasoning: bool = False
    tools: bool = False
    stops: bool = True
    least: bool = False
    leaves: bool = False
    lag: int = 1
    turn_tokens: int = 3
    turn_outputs: int = 2
    depth: int = 2

    def __post_init__(self) -> None:
        if min(self.n, self.prompts, self.lag, self.turn_tokens, self.turn_outputs, self.depth) < 1:
            raise ValueError(f"every number of {self} is at least 1")
        if self.protocol == "chat" and (self.prompts > 1 or self.echo):
            raise ValueError("a chat has one prompt and echoes none")
        if self.protocol != "chat" and (self.reasoning or self.tools):
            raise ValueError("only a chat tells reasoning and calls apart")


class TextDecoder:
    """Decodes one byte per token; one more token ends the reasoning."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        del skip_special_tokens
        return b"".join([_TEXTS.get(one, bytes([one % _BYTES])) for one in ids]).decode(errors="replace")

    def id_to_token(self, id: int) -> str | None:  # noqa: A002 - the tokenizer's own name
        del id
        return None


DECODER: Final = TextDecoder()
_SERVED: Final[Any] = SimpleNamespace(
    tokenizer=DECODER, model_name="m", limits=Limits.of(EngineConfig(), EMBEDDED_FACTS), sampling_defaults={}
)


def byte_tokens(tokens: Sequence[int], stops: Sequence[int], settings: SessionSettings) -> list[int]:
    """Turn the tokens of the simulated model into tokens of text, mostly one byte each.

    A stop token becomes the end of a stop string, one token ends the reasoning, if there is any, and with tools some
    tokens become calls. Without ``stops`` some characters take three bytes.
    """
    emitted: list[int] = []
    rest: list[int] = []
    has_reasoned = not settings.reasoning
    for token in tokens:
        if token in stops:
            # It also ends a call between its two tokens.
            rest = []
            emitted.append(_STOP_LETTER)
        elif rest:
            emitted.append(rest.pop(0))
        elif not has_reasoned and token % 3 == 0:
            has_reasoned = True
            emitted.append(_END_OF_REASONING)
        elif settings.tools and token % 3 == 0:
            first, *rest = _CALL
            emitted.append(first)
        elif not stops and token % 4 == 0:
            first, *rest = "\u20ac".encode()
            emitted.append(first)
        else:
            emitted.append(_LETTERS[token % len(_LETTERS)])
    return emitted


def logprob_of(token: int, place: int) -> TokenLogprob:
    return TokenLogprob(logprob=-float(token) - place / 1024)


def prompt_logprobs_of(message: Generate) -> tuple[PromptLogprob, ...]:
    """Return the logprobs of a prompt's tokens after the first, different for each request."""
    last = message.rid.rpartition("-")[2]
    own = int(last) / 64 if last.isdecimal() else 0.0
    return tuple([PromptLogprob(-float(token) - place / 1024 - own, 1) for place, token in _scored(message)])


def _scored(message: Generate) -> list[tuple[int, int]]:
    return list(enumerate(message.prompt_ids))[1:] if message.prompt_logprobs_from >= 0 else []


class _ChoiceView(NamedTuple):
    """One choice as its client received it.

    ``offsets`` are the positions of its logprobs in a completion's text, ``spelled`` the texts beside the logprobs,
    ``calls`` the names and arguments of its calls; ``roles`` counts the role fields of a chat.
    """

    ids: list[int]
    text: str
    reasoning: str
    logprobs: list[float | None]
    offsets: list[int]
    spelled: list[str]
    calls: list[tuple[str, str]]
    reason: str
    prompt: list[int] | None
    roles: int


class OpenAnswer:
    """One reply from its first message to its last byte.

    ``emitted`` has the output tokens of each request, in the order in which the requests were sent; ``scored`` has the
    requests whose prompt logprobs were sent, and ``ends`` the scheduler's finish reasons. A client that ``has_left``
    reads no more.
    """

    def __init__(self, add: Add, settings: SessionSettings, sessions: Sessions) -> None:
        self.add = add
        self._settings = settings
        self.order = _order_of(add, settings)
        self.session = Session(
            sessions,
            self.order,
            _shape_of(self.order, settings),
            DECODER,
            tokens_a_turn=settings.turn_tokens,
            outputs_a_turn=settings.turn_outputs,
        )
        self.emitted: dict[str, list[int]] = {}
        self.scored: set[str] = set()
        self.ends: dict[str, FinishReason] = {}
        self.is_sending = True
        self.has_left = self.is_over = False
        self._written = b""
        self._error: ApiError | None = None

    def unneeded_requests(self) -> list[str]:
        """Return the requests that the front end should have aborted: a choice failed, or a stop string was found."""
        going = [one for one in self.order.messages if one.rid in self.emitted and one.rid not in self.ends]
        if self.is_over and any(end in FAILURES for end in self.ends.values()):
            return [one.rid for one in going]
        if self.is_sending or self.has_left or self.session.has_more:
            return []
        return [one.rid for one in going if _has_stop(self.emitted[one.rid], one.sampling)]

    @property
    def is_done(self) -> bool:
        """True once the reply is complete or its client has left, and every request that was sent has ended."""
        return (self.is_over or self.has_left) and len(self.ends) == len(self.emitted)

    def cached_tokens_of(self, message: Generate) -> dict[str, int]:
        """Return the cached tokens that the scheduler reports by tier, different for each prompt."""
        prompt = self.order.messages.index(message) // self.order.n
        return dict(zip(_TIERS, (1 + 2 * prompt, 2 + prompt), strict=True))

    def send(self) -> None:
        self.is_sending = self.session.send_some()

    def leave(self) -> None:
        self.session.abort()
        self.has_left, self.is_sending = True, False

    def read(self) -> None:
        """Read the available output, up to the limit of a turn; check a finished reply. Raises Violation."""
        if self.is_over or self.has_left or self.is_sending or not self.session.has_more:
            return
        try:
            if self.order.stream:
                self._written += self.session.part()
                self.is_over = self.session.is_told
            elif self.session.collect():
                self._written = finished(self.session.body())
                self.is_over = True
        except ApiError as exc:
            self._error, self.is_over = exc, True
        if self.is_over:
            self._check_reply()

    # -- the expected reply --

    def _check_reply(self) -> None:
        has_failed = any(end in FAILURES for end in self.ends.values())
        is_error = self._error is not None or b'"error"' in self._written
        if has_failed or is_error:
            if has_failed is not is_error:
                raise Violation(f"{self.add.rid} ended with {self.ends}, but its client was told {self._error}")
            return
        received, usage, tiers = self._received()
        for index, message in enumerate(self.order.messages):
            expected = self._expected(index, message)
            if received.get(index) != expected:
                raise Violation(
                    f"choice {index} of {self.add.rid} is told {received.get(index)}, but must be {expected}"
                )
        prompts = self.order.messages[:: self.order.n]
        if tiers != (due := {tier: sum(self.cached_tokens_of(one)[tier] for one in prompts) for tier in _TIERS}):
            raise Violation(f"the cached tokens of {self.add.rid} are {due}, but it says {tiers}")
        if usage is not None:
            self._check_usage(usage, prompts, list(received.values()))

    def _check_usage(self, usage: dict[str, Any], prompts: Sequence[Generate], choices: Sequence[_ChoiceView]) -> None:
        counts = {
            "prompt_tokens": sum(len(one.prompt_ids) for one in prompts),
            "completion_tokens": sum(len(one.ids) for one in choices),
            "cached_tokens": sum(sum(self.cached_tokens_of(one).values()) for one in prompts),
        }
        counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
        if self._settings.reasoning:
            counts["reasoning_tokens"] = sum(_reasoning_tokens(one.ids) for one in choices if one.reasoning)
        found = usage | usage["prompt_tokens_details"] | usage.get("completion_tokens_details", {})
        if wrong := {name: found.get(name) for name, count in counts.items() if found.get(name) != count}:
            raise Violation(f"the usage of {self.add.rid} must have {counts}, but says {wrong}")

    def _expected(self, index: int, message: Generate) -> _ChoiceView:
        emitted = self.emitted[message.rid]
        count, chars = _stop_position(emitted, message.sampling)
        is_stopped = count is not None
        ids = emitted[:count]
        # A text that ends inside a character ends with a replacement character.
        text = DECODER.decode(ids)[:chars]
        reasoning = ""
        if self._settings.reasoning:
            reasoning, _, text = text.partition(END)
        text, calls = _without_calls(text)
        echo = DECODER.decode(message.prompt_ids) if self.order.echo else ""
        is_call = bool(calls) and calls[-1][1] == _ARGUMENTS[1]
        reason = ("tool_calls" if is_call else "stop") if is_stopped else self.ends[message.rid].value
        prompt = list(message.prompt_ids) if self._settings.protocol != "chat" or not index else None
        is_chat = self._settings.protocol == "chat"
        logprobs, offsets = self._expected_prompt_scores(index)
        spelled = [DECODER.decode([token]) for token in message.prompt_ids[: len(logprobs)]]
        if self._settings.logprobs:
            spelled += [DECODER.decode([token]) for token in ids]
            logprobs += [logprob_of(token, place).logprob for place, token in enumerate(ids)]
            # A token inside a character has that character's position.
            before = [DECODER.decode(ids[:place]).rstrip(_REPLACEMENT) for place in range(len(ids))]
            offsets += [] if is_chat else [len(echo) + len(one) for one in before]
        return _ChoiceView(
            ids, echo + text, reasoning, logprobs, offsets, spelled, calls, reason, prompt, roles=int(is_chat)
        )

    def _expected_prompt_scores(self, index: int) -> tuple[list[float | None], list[int]]:
        """Return an echoed prompt's logprobs and their positions; without streaming, they are the first choice's."""
        if not (self.order.echo and self._settings.logprobs):
            return [], []
        scorer = self.order.messages[index if self.order.stream else index - index % self.order.n]
        scores = prompt_logprobs_of(scorer) if scorer.rid in self.scored else ()
        return [None, *[one.logprob for one in scores]], list(range(1 + len(scores)))

    def _received(self) -> tuple[dict[int, _ChoiceView], dict[str, Any] | None, dict[str, int]]:
        """Return the choices, the usage if any, and the cached tokens by tier, from a stream or a whole reply."""
        events = self._events() if self.order.stream else [json.loads(self._written)]
        if heads := {(event["id"], event["model"]) for event in events} - {(self.order.rid, _SERVED.model_name)}:
            raise Violation(f"the reply {self.order.rid} is told as {sorted(heads)}")
        parts: dict[int, list[dict[str, Any]]] = {}
        prompt = next((event["prompt_token_ids"] for event in events if "prompt_token_ids" in event), None)
        for event in events:
            for choice in event["choices"]:
                parts.setdefault(choice["index"], []).append(choice)
        received = {index: _combined(choices) for index, choices in parts.items()}
        if 0 in received and prompt is not None:
            received[0] = received[0]._replace(prompt=prompt)
        shown = (event["sglext"]["cached_tokens_details"] for event in events if "sglext" in event)
        tiers: dict[str, int] = next(shown, {})
        return received, events[-1].get("usage"), tiers

    def _events(self) -> list[dict[str, Any]]:
        """Parse the events of a stream. Raises Violation unless exactly the requested events carry the usage."""
        lines = [line.removeprefix(b"data: ") for line in self._written.split(b"\n\n") if line]
        if lines[-1:] != [b"[DONE]"]:
            raise Violation(f"the stream of {self.add.rid} ends with {lines[-1:]}, which is not [DONE]")
        events = [json.loads(line) for line in lines[:-1]]
        wanted, with_choices = self._settings.usage, [event for event in events if event["choices"]]
        if wanted == "none":
            fits = not any("usage" in event for event in events)
        elif wanted == "end":
            fits = all("usage" in event and event["usage"] is None for event in with_choices)
        else:
            counts = [event["usage"]["completion_tokens"] for event in with_choices]
            told = list(accumulate(len(event["choices"][0].get("token_ids") or ()) for event in with_choices))
            fits = all(map(int.__le__, told, counts)) and all(one <= after for one, after in pairwise(counts))
        if not fits:
            usages = [event.get("usage", "none") for event in events]
            raise Violation(f"the stream of {self.add.rid} was asked for usage={wanted}, but has {usages}")
        return events


def _combined(choices: Sequence[dict[str, Any]]) -> _ChoiceView:
    """Concatenate the parts of one choice; a reply without streaming has one part."""
    ids: list[int] = []
    texts: list[str] = []
    reasoning: list[str] = []
    logprobs: list[float | None] = []
    offsets: list[int] = []
    spelled: list[str] = []
    calls: dict[int, dict[str, Any]] = {}
    roles = 0
    for choice in choices:
        message = choice.get("delta") or choice.get("message") or {}
        ids += choice.get("token_ids") or ()
        texts.append(choice.get("text") or message.get("content") or "")
        reasoning.append(message.get("reasoning_content") or "")
        values = choice.get("logprobs") or {}
        logprobs += values.get("token_logprobs") or [one["logprob"] for one in values.get("content") or ()]
        offsets += values.get("text_offset") or ()
        spelled += values.get("tokens") or _spelled_in_chat(values.get("content") or ())
        for place, call in enumerate(message.get("tool_calls") or ()):
            _add_call(calls, call, call.get("index", place))
        roles += "role" in message
    prompt = next((choice["prompt_token_ids"] for choice in choices if "prompt_token_ids" in choice), None)
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    if len(reasons) != 1 or not choices[-1].get("finish_reason"):
        raise Violation(f"choice {choices[0]['index']} ends with {reasons}, and must end once, with its last part")
    if list(calls) != list(range(len(calls))) or len({one["id"] for one in calls.values()}) < len(calls):
        raise Violation(f"choice {choices[0]['index']} has the calls {calls}, which need numbers and ids of their own")
    named = [(one["name"], one["arguments"]) for one in calls.values()]
    return _ChoiceView(
        ids, "".join(texts), "".join(reasoning), logprobs, offsets, spelled, named, reasons[0], prompt, roles
    )


def _spelled_in_chat(entries: Sequence[dict[str, Any]]) -> list[str]:
    """Return the texts of a chat's tokens. Raises Violation if their bytes spell something else."""
    if wrong := [one for one in entries if bytes(one["bytes"]).decode() != one["token"]]:
        raise Violation(f"the bytes beside logprobs spell other tokens: {wrong}")
    return [one["token"] for one in entries]


def _add_call(calls: dict[int, dict[str, Any]], call: dict[str, Any], index: int) -> None:
    """Add a call of a message, or a part of one. Only the first part has the name and the id."""
    function = call["function"]
    if index not in calls:
        calls[index] = {"id": call["id"], **function}
    elif "id" in call or "name" in function:
        raise Violation(f"the call {calls[index]} begins again with {call}")
    else:
        calls[index]["arguments"] += function["arguments"]


def _without_calls(text: str) -> tuple[str, list[tuple[str, str]]]:
    """Return the content of an output and its calls, of which the last may be cut."""
    begin, end = _CALL_TEXTS
    content, *parts = text.split(begin)
    calls = [("add", _ARGUMENTS[part.startswith(end)]) for part in parts]
    return content + "".join(part.removeprefix(end) for part in parts), calls


def _reasoning_tokens(ids: Sequence[int]) -> int:
    return ids.index(_END_OF_REASONING) + 1 if _END_OF_REASONING in ids else len(ids)


def _stop_position(tokens: Sequence[int], sampling: SamplingParams) -> tuple[int | None, int | None]:
    """Return the number of tokens up to the end of a stop string, and of characters before it, or None twice."""
    scanned_from = 0
    for count in range(1, len(tokens) + 1):
        text = DECODER.decode(tokens[:count])
        if count < sampling.min_new_tokens:
            scanned_from = len(text)
            continue
        ends = [(at + len(stop), at) for stop in sampling.stop if (at := text.find(stop, scanned_from)) >= 0]
        if ends:
            return count, min(ends)[1]
    return None, None


def _has_stop(tokens: Sequence[int], sampling: SamplingParams) -> bool:
    """Return whether an output contains a stop string once it has its minimum number of tokens."""
    if not sampling.stop or len(tokens) < sampling.min_new_tokens:
        return False
    start = len(DECODER.decode(tokens[: max(0, sampling.min_new_tokens - 1)]))
    text = DECODER.decode(tokens)
    return any(text.find(stop, start) >= 0 for stop in sampling.stop)


def _order_of(add: Add, settings: SessionSettings) -> Order:
    """Return the order whose first request is ``add``; every further prompt has another beginning.

    The front end makes it from the body of a completion; the sampling parameters are then set for each choice.
    """
    prompts = [[*(ord("p") + number for number in range(index)), *add.prompt_ids] for index in range(settings.prompts)]
    body: dict[str, Any] = {
        "rid": add.rid,
        "prompt": prompts,
        "n": settings.n,
        "echo": settings.echo,
        "logprobs": 0 if settings.logprobs else None,
        "return_token_ids": True,
        "return_cached_tokens_details": True,
        "max_tokens": add.max_new_tokens,
        "stream": settings.stream,
    }
    if settings.stream and settings.usage != "none":
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": settings.usage == "each"}
    order = completion_order(json.dumps(body).encode(), _SERVED)
    messages = tuple(
        msgspec.structs.replace(message, sampling=sampling_of(_sampling_of(add, number, settings), number % settings.n))
        for number, message in enumerate(order.messages)
    )
    return msgspec.structs.replace(order, messages=messages)


def model_tokens(add: Add, number: int) -> list[int]:
    """Return the tokens that the model emits for this request: its own output for the first, rotated for the others."""
    output = add.alone(add.max_new_tokens)
    start = number % len(output)
    return [*output[start:], *output[:start]]


def _sampling_of(add: Add, number: int, settings: SessionSettings) -> SamplingParams:
    stops: tuple[str, ...] = _STOPS if add.stop_token_ids else ()
    usual = _STOPS_BESIDE_CALLS if settings.tools else _USUAL_STOPS
    stops += usual if settings.stops and number else ()
    sampling = SamplingParams(max_new_tokens=add.max_new_tokens, stop=stops, seed=7, temperature=0.0)
    if settings.least:
        emitted = byte_tokens(model_tokens(add, number), add.stop_token_ids, settings)
        return msgspec.structs.replace(sampling, min_new_tokens=_stop_position(emitted, sampling)[0] or 0)
    return sampling


def _shape_of(order: Order, settings: SessionSettings) -> Shape:
    if settings.protocol != "chat":
        return CompletionShape(order, _SERVED)
    return ChatShape(order, _SERVED, lambda: _choice_of(settings))


def _choice_of(settings: SessionSettings) -> SpokenChoice:
    if not (settings.reasoning or settings.tools):
        return SpokenChoice()
    reasoning = ReasoningSplitter(ReasoningStart.OPEN) if settings.reasoning else None
    calls = FAMILIES["hermes"](("add",)) if settings.tools else None
    end = _END_OF_REASONING if settings.reasoning else None
    return SpokenChoice(AnswerParser(reasoning, calls, parallel=True), end_of_reasoning=end)
