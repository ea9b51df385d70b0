"""One reply of the front end under the search: its order, its client's input so far, and the expected reply."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from pydantic_core import to_json

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FAILURES, Abort, FinishReason, Generate, SamplingParams
from engine.frontend.protocols.anthropic import MessageShape
from engine.frontend.protocols.openai.chat_blocks import SpokenChoice
from engine.frontend.protocols.openai.requests import completion_order
from engine.frontend.protocols.openai.response_bodies import ResponseBody
from engine.frontend.protocols.openai.response_shapes import ResponseShape
from engine.frontend.protocols.openai.shapes import ChatShape, CompletionShape
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.frontend.schema.native import parse_body
from engine.frontend.sessions.requests import Order, sampling_of
from engine.frontend.sessions.sessions import Session, Sessions, Shape, finished
from engine.frontend.text.dialect import AnswerParser
from engine.frontend.text.reasoning import ReasoningSplitter, ReasoningStart
from engine.frontend.text.tools.families import FAMILIES
from scripted.core.violation import Violation
from scripted.sdk import Add
from scripted_lockstep.sessions.blocks import (
    ERRORS_OF_MESSAGES,
    blocks_of,
    streamed_blocks,
    usage_of,
    whole_blocks,
)
from scripted_lockstep.sessions.received import ReceivedChoice, choices_in, events_in
from scripted_lockstep.sessions.settings import SessionSettings
from scripted_lockstep.sessions.texts import (
    DECODERS,
    END_OF_REASONING,
    REPLACEMENT,
    TOOL,
    OutputParts,
    byte_tokens,
    logprob_of,
    output_parts,
    prompt_logprobs_of,
    reasoning_tokens,
    stop_position,
)

_STOPS: Final = ("z", "xz", "yyz")
# Stop strings of ordinary letters, which outputs often contain.
_USUAL_STOPS: Final = ("c", "bc", "ab", "x")
# Stop strings of letters that no call contains, and one inside each call, before which only closers are missing.
_STOPS_BESIDE_CALLS: Final = ("y", "xy", "yx")
_STOPS_IN_CALLS: Final = ("7", "xy")
_TIERS: Final = ("device", "host")
_SERVED: Final[Any] = SimpleNamespace(
    tokenizer=DECODERS["none"], model_name="m", limits=Limits.of(EngineConfig(), EMBEDDED_FACTS), sampling_defaults={}
)
# The type of the error that each end of a request becomes; the scheduler refuses replies because it is busy.
_CHATS: Final[dict[str, type[ChatShape | MessageShape | ResponseShape]]] = {
    "chat": ChatShape,
    "messages": MessageShape,
    "responses": ResponseShape,
}
# The fields of a response that repeat its request.
_SHOWN: Final = to_json(parse_body(ResponseBody, b'{"model": "m", "input": "p"}').shown)
_ERRORS: Final = {FinishReason.ERROR: ErrorType.ENGINE, FinishReason.TIMEOUT: ErrorType.TIME_LIMIT}


class OpenAnswer:
    """One reply from its first message to its last byte.

    ``emitted`` has the output tokens of each request, in the order in which the requests were sent; ``scored`` has the
    requests whose prompt logprobs were sent, ``ends`` the scheduler's finish reasons, and ``stopped`` the requests that
    it ended at a stop token; the front end has aborted those ``called_off``. ``is_known``: the search knows it, and the
    device computes its first request, which has the ``number`` 0 then; ``is_reported``: the search was told that it has
    ended. ``is_late``: its time has run out. ``posted`` counts the requests that the front end has sent. A client that
    ``has_left`` reads no more.
    """

    def __init__(
        self, add: Add, settings: SessionSettings, sessions: Sessions, *, is_known: bool = True, number: int = 0
    ) -> None:
        self.add = add
        self.is_known = is_known
        self.number = number
        self._settings = settings
        self._decoder = DECODERS[settings.tools]
        self.order = _order_of(add, settings, number)
        self.session = Session(
            sessions,
            self.order,
            _shape_of(self.order, settings),
            self._decoder,
            tokens_a_turn=settings.turn_tokens,
            outputs_a_turn=settings.turn_outputs,
        )
        self.emitted: dict[str, list[int]] = {}
        self.scored: set[str] = set()
        self.ends: dict[str, FinishReason] = {}
        self.stopped: set[str] = set()
        self.called_off: set[str] = set()
        self.is_reported = self.is_late = self.is_called_off = False
        self.posted = 0
        self.is_sending = True
        self.has_left = self.is_over = False
        # None until the scheduler has decided.
        self.is_refused: bool | None = None
        # The tokens and ends of the requests before the first failure.
        self._before_failure: dict[str, tuple[int, bool]] | None = None
        self._written = b""
        self._error: ApiError | None = None

    def note_end(self, rid: str, end: FinishReason) -> None:
        """Note the terminal reply of a request; its tokens were noted before."""
        if end in FAILURES and self._before_failure is None:
            shown = {rid for rid, end in self.ends.items() if end is not FinishReason.TIMEOUT or self.emitted[rid]}
            self._before_failure = {rid: (len(ids), rid in shown) for rid, ids in self.emitted.items()}
        self.ends[rid] = end

    def check_reason(self, abort: Abort) -> None:
        """Raise Violation for an abort by the front end that says another reason than its own."""
        is_over = self.has_left or self.is_called_off or any(end in FAILURES for end in self.ends.values())
        if not is_over and abort.finish_reason is not FinishReason.STOP:
            raise Violation(f"{abort.rid} reached a stop string, but the scheduler is told {abort.finish_reason}")

    def unneeded_requests(self) -> list[str]:
        """Return the requests that the front end should have aborted: a choice failed, or a stop string was found."""
        over = self.ends.keys() | self.called_off
        going = [one for one in self.order.messages if one.rid in self.emitted and one.rid not in over]
        if self.is_over and any(end in FAILURES for end in self.ends.values()):
            return [one.rid for one in going]
        if self.is_sending or self.has_left or self.session.has_more:
            return []
        return [one.rid for one in going if self._stop_position(one)[0] is not None]

    @property
    def is_done(self) -> bool:
        """True once the reply is complete or its client has left, and every request that was sent has ended."""
        return (self.is_over or self.has_left) and len(self.ends) == self.posted

    def cached_tokens_of(self, message: Generate) -> dict[str, int]:
        """Return the cached tokens that the scheduler reports by tier, different for each prompt."""
        prompt = self.order.messages.index(message) // self.order.n
        return dict(zip(_TIERS, (1 + 2 * prompt, 2 + prompt), strict=True))

    def send(self) -> None:
        self.is_sending = self.session.send_some()

    def leave(self) -> None:
        self.has_left, self.is_sending = True, False
        self.session.abort()

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
        due = self._due_error()
        events, is_closed = events_in(self._written) if self.order.stream else ([], True)
        told = events[-1]["error"]["type"] if events and events[-1].get("error") else None
        if self._error is not None:
            told = self._error.body.error.type
        elif self._settings.protocol == "messages":
            due = ERRORS_OF_MESSAGES.get(due, due)
        if told != due:
            raise Violation(f"{self.add.rid} ended with {self.ends}, an error {due}, but its client was told {told}")
        if due is not None:
            self._check_broken(events)
            return
        if self._settings.has_blocks:
            self._check_blocks(events)
            return
        if not is_closed:
            raise Violation(f"the stream of {self.add.rid} ends with {self._written[-20:]!r}, which is not [DONE]")
        if self.order.stream:
            self._check_usage_of_events(events)
        else:
            events = [json.loads(self._written)]
        self._check_whole(events)

    def _check_blocks(self, events: Sequence[dict[str, Any]]) -> None:
        """Compare a reply of blocks. Raises Violation."""
        (message,), protocol, is_whole = self.order.messages, self._settings.protocol, not self.order.stream
        told = whole_blocks(json.loads(self._written), protocol) if is_whole else streamed_blocks(events, protocol)
        ids, parts, end, stop = self._output_of(message)
        shown = [logprob_of(token, place).logprob for place, token in enumerate(ids)] if self.order.logprobs else []
        due = blocks_of(parts, end, stop, shown, protocol, is_whole=is_whole)
        counts = {
            "prompt": len(message.prompt_ids),
            "cached": sum(self.cached_tokens_of(message).values()),
            "output": len(ids),
            "reasoning": reasoning_tokens(ids) if parts.reasoning else 0,
        }
        if told != (due := due._replace(usage=usage_of(counts, protocol))):
            raise Violation(f"the reply {self.add.rid} is told {told}, but must be {due}")

    def _due_error(self) -> str | None:
        """Return the type of the error that must end the reply, if any."""
        if self.is_refused:
            return ErrorType.BUSY
        failed = [end for end in self.ends.values() if end in FAILURES]
        has_output = any(self.emitted.values()) or any(end is not FinishReason.TIMEOUT for end in self.ends.values())
        ends = failed or ([] if has_output else [FinishReason.TIMEOUT])
        return _ERRORS[ends[0]] if ends else None

    def _check_broken(self, events: Sequence[dict[str, Any]]) -> None:
        """Check what a reply shows before its error: all that came before it, in a stream, and else nothing."""
        before = self._before_failure or {}
        has_output = any(count or has_ended for count, has_ended in before.values())
        if (self._error is None) is not (self.order.stream and has_output):
            raise Violation(f"{self.add.rid} failed after {before}, but its client was told {self._error}, {events}")
        if self._settings.has_blocks:
            # Its form is that of a whole reply; the texts of what was held back are not due.
            return
        told = self._choices_in(events[:-1], is_whole=False)
        for index, message in enumerate(self.order.messages):
            count, _ = before.get(message.rid, (0, False))
            due = self.emitted.get(message.rid, [])[:count][: self._stop_position(message)[0]]
            ids = told[index].ids if index in told else []
            if events and ids != due:
                raise Violation(f"choice {index} of {self.add.rid} is told {ids} before an error, and not {due}")

    def _check_whole(self, events: Sequence[dict[str, Any]]) -> None:
        if heads := {(event["id"], event["model"]) for event in events} - {(self.order.rid, _SERVED.model_name)}:
            raise Violation(f"the reply {self.order.rid} is told as {sorted(heads)}")
        received = self._choices_in(events, is_whole=True)
        prompt = next((event["prompt_token_ids"] for event in events if "prompt_token_ids" in event), None)
        if 0 in received and prompt is not None:
            received[0] = received[0]._replace(prompt=prompt)
        for index, message in enumerate(self.order.messages):
            expected = self._expected(index, message)
            if received.get(index) != expected:
                raise Violation(
                    f"choice {index} of {self.add.rid} is told {received.get(index)}, but must be {expected}"
                )
        prompts = self.order.messages[:: self.order.n]
        shown = (event["sglext"]["cached_tokens_details"] for event in events if "sglext" in event)
        tiers: dict[str, int] = next(shown, {})
        if tiers != (due := {tier: sum(self.cached_tokens_of(one)[tier] for one in prompts) for tier in _TIERS}):
            raise Violation(f"the cached tokens of {self.add.rid} are {due}, but it says {tiers}")
        if (usage := events[-1].get("usage")) is not None:
            self._check_usage(usage, prompts, list(received.values()))

    def _choices_in(self, events: Sequence[dict[str, Any]], *, is_whole: bool) -> dict[int, ReceivedChoice]:
        return choices_in(
            events,
            is_plain=not self._settings.has_parts,
            gives_ids=self._settings.tools == "mistral",
            is_whole=is_whole,
        )

    def _check_usage(
        self, usage: dict[str, Any], prompts: Sequence[Generate], choices: Sequence[ReceivedChoice]
    ) -> None:
        counts = {
            "prompt_tokens": sum(len(one.prompt_ids) for one in prompts),
            "completion_tokens": sum(len(one.ids) for one in choices),
            "cached_tokens": sum(sum(self.cached_tokens_of(one).values()) for one in prompts),
        }
        counts["total_tokens"] = counts["prompt_tokens"] + counts["completion_tokens"]
        if self._settings.reasoning:
            counts["reasoning_tokens"] = sum(reasoning_tokens(one.ids) for one in choices if one.reasoning)
        found = usage | usage["prompt_tokens_details"] | usage.get("completion_tokens_details", {})
        if wrong := {name: found.get(name) for name, count in counts.items() if found.get(name) != count}:
            raise Violation(f"the usage of {self.add.rid} must have {counts}, but says {wrong}")

    def _stop_position(self, message: Generate) -> tuple[int | None, int, str]:
        return stop_position(self.emitted.get(message.rid, []), message.sampling, self._decoder)

    def _output_of(self, message: Generate) -> tuple[list[int], OutputParts, str, str | None]:
        """Return the ids of an output, its parts, its finish reason, and the stop string that ended it, if any."""
        count, chars, stop = self._stop_position(message)
        ids = self.emitted[message.rid][:count]
        is_models_end = message.rid in self.stopped and count is None
        # A text that ends inside a character ends with a replacement character; a stop token has no text.
        text = self._decoder.decode(ids[:-1] if is_models_end else ids)
        if count is not None:
            text = text[:chars] + (stop if self._settings.shows_stop else "")
        parts = output_parts(text, self._settings, is_models_end=is_models_end)
        end = "stop" if count is not None else self.ends[message.rid].value
        if is_models_end and parts.is_cut:
            end = "length"
        return ids, parts, end, None if count is None else stop

    def _expected(self, index: int, message: Generate) -> ReceivedChoice:
        ids, parts, reason, _ = self._output_of(message)
        is_chat = self._settings.is_chat
        if reason == "stop" and parts.calls and not parts.is_cut:
            reason = "tool_calls"
        echo = self._decoder.decode(message.prompt_ids) if self.order.echo else ""
        view = ReceivedChoice(
            ids=ids,
            text=echo + parts.content,
            reasoning=parts.reasoning,
            calls=parts.calls,
            reason=reason,
            prompt=list(message.prompt_ids) if not is_chat or not index else None,
            roles=int(is_chat),
        )
        return self._with_logprobs(view, index, message, begin=len(echo))

    def _with_logprobs(self, view: ReceivedChoice, index: int, message: Generate, *, begin: int) -> ReceivedChoice:
        decode, ids = self._decoder.decode, view.ids
        logprobs, offsets = self._expected_prompt_scores(index)
        spelled = [decode([token]) for token in message.prompt_ids[: len(logprobs)]]
        tops: list[dict[str, float] | None] = [None if one is None else {} for one in logprobs]
        if self._settings.logprobs:
            entries = [logprob_of(token, place) for place, token in enumerate(ids)]
            spelled += [decode([token]) for token in ids]
            logprobs += [one.logprob for one in entries]
            tops += [{decode([token]): value for token, value in one.top} for one in entries]
            # A token inside a character has that character's position.
            before = [decode(ids[:place]).rstrip(REPLACEMENT) for place in range(len(ids))]
            offsets += [] if self._settings.is_chat else [begin + len(one) for one in before]
        return view._replace(logprobs=logprobs, offsets=offsets, spelled=spelled, tops=tops)

    def _expected_prompt_scores(self, index: int) -> tuple[list[float | None], list[int]]:
        """Return an echoed prompt's logprobs and their positions; without streaming, they are the first choice's."""
        if not (self.order.echo and self._settings.logprobs):
            return [], []
        scorer = self.order.messages[index if self.order.stream else index - index % self.order.n]
        scores = prompt_logprobs_of(scorer) if scorer.rid in self.scored else ()
        return [None, *[one.logprob for one in scores]], list(range(1 + len(scores)))

    def _check_usage_of_events(self, events: Sequence[dict[str, Any]]) -> None:
        """Raise Violation unless exactly the requested events of a stream carry the usage."""
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


def _order_of(add: Add, settings: SessionSettings, first: int) -> Order:
    """Return the order whose first request is ``add``; every further prompt has another beginning.

    The front end makes it from the body of a completion; the sampling parameters are then set for each choice.
    """
    prompts = [[*(ord("p") + number for number in range(index)), *add.prompt_ids] for index in range(settings.prompts)]
    body: dict[str, Any] = {
        "rid": add.rid,
        "prompt": prompts,
        "n": settings.choices,
        "echo": settings.echo,
        "logprobs": 0 if settings.logprobs and not (settings.has_blocks and settings.has_parts) else None,
        "return_token_ids": True,
        "return_cached_tokens_details": True,
        "include_stop_str_in_output": settings.shows_stop,
        "max_tokens": add.max_new_tokens,
        "stream": settings.stream,
    }
    if settings.stream and settings.usage != "none":
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": settings.usage == "each"}
    order = completion_order(json.dumps(body).encode(), _SERVED)
    n = settings.choices
    messages = tuple(
        msgspec.structs.replace(message, sampling=sampling_of(_sampling_of(add, first + number, settings), number % n))
        for number, message in enumerate(order.messages)
    )
    seeds = [message.sampling.seed for message in messages[:n]]
    if len(set(seeds)) < n:
        raise Violation(f"the choices of {add.rid} have the seeds {seeds}, and would be alike")
    return msgspec.structs.replace(order, messages=messages, shown_request=_SHOWN)


def model_tokens(add: Add, number: int) -> list[int]:
    """Return the tokens that the model emits for this request: its own output for the first, rotated for the others."""
    output = add.alone(add.max_new_tokens)
    start = number % len(output)
    return [*output[start:], *output[:start]]


def _sampling_of(add: Add, number: int, settings: SessionSettings) -> SamplingParams:
    stops: tuple[str, ...] = _STOPS if add.stop_token_ids and not settings.stop_tokens else ()
    beside = _STOPS_IN_CALLS if (number + len(add.prompt_ids)) % 2 else _STOPS_BESIDE_CALLS
    usual = beside if settings.has_tools else _USUAL_STOPS
    stops += usual if settings.stops and number else ()
    sampling = SamplingParams(max_new_tokens=add.max_new_tokens, stop=stops, seed=7, temperature=0.0)
    if settings.least:
        emitted = byte_tokens(model_tokens(add, number), add.stop_token_ids, settings)
        least = stop_position(emitted, sampling, DECODERS[settings.tools])[0] or 0
        return msgspec.structs.replace(sampling, min_new_tokens=least)
    return sampling


def _shape_of(order: Order, settings: SessionSettings) -> Shape:
    served: Any = SimpleNamespace(**vars(_SERVED) | {"tokenizer": DECODERS[settings.tools]})
    if settings.protocol == "completions":
        return CompletionShape(order, served)
    return _CHATS[settings.protocol](order, served, lambda: _choice_of(settings))


def _choice_of(settings: SessionSettings) -> SpokenChoice:
    if not settings.has_parts:
        return SpokenChoice()
    reasoning = ReasoningSplitter(ReasoningStart.OPEN) if settings.reasoning else None
    calls = FAMILIES[settings.tools]((TOOL,)) if settings.has_tools else None
    end = END_OF_REASONING if settings.reasoning else None
    return SpokenChoice(AnswerParser(reasoning, calls, parallel=settings.parallel), end_of_reasoning=end)
