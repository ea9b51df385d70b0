"""The order of one reply under the search, as the front end makes it from the body of a request, and its shape."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, Final

import msgspec
from pydantic_core import to_json

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import SamplingParams
from engine.frontend.protocols.anthropic import MessageShape
from engine.frontend.protocols.openai.chat_blocks import SpokenChoice
from engine.frontend.protocols.openai.requests import completion_order
from engine.frontend.protocols.openai.response_bodies import ResponseBody
from engine.frontend.protocols.openai.response_shapes import ResponseShape
from engine.frontend.protocols.openai.shapes import ChatShape, CompletionShape
from engine.frontend.schema.errors import ErrorBody
from engine.frontend.schema.native import GenerateAnswer, parse_body
from engine.frontend.sessions.requests import Order, native_order, sampling_of
from engine.frontend.sessions.sessions import NativeShape, Shape, Shaping
from engine.frontend.text.dialect import AnswerParser
from engine.frontend.text.reasoning import ReasoningSplitter, ReasoningStart
from engine.frontend.text.tools.families import FAMILIES
from scripted.core.violation import Violation
from scripted.sdk import Add
from scripted_lockstep.sessions.settings import SessionSettings
from scripted_lockstep.sessions.texts import (
    DECODERS,
    END_OF_REASONING,
    REPLACEMENT,
    SPECIAL,
    STOP_LETTER,
    TOOL,
    byte_tokens,
    stop_position,
)

_STOPS: Final = ("z", "xz", "yyz")
# Stop strings of ordinary letters, which outputs often contain.
_USUAL_STOPS: Final = ("c", "bc", "ab", "x")
# Stop strings of letters that no call contains, and one inside each call, before which only closers are missing.
_STOPS_BESIDE_CALLS: Final = ("y", "xy", "yx")
_STOPS_IN_CALLS: Final = ("7", "xy")
_MOST_STOP_CHARS: Final = 4
SERVED: Final[Any] = SimpleNamespace(
    tokenizer=DECODERS["none"], model_name="m", limits=Limits.of(EngineConfig(), EMBEDDED_FACTS), sampling_defaults={}
)
_CHATS: Final[dict[str, type[ChatShape | MessageShape | ResponseShape]]] = {
    "chat": ChatShape,
    "messages": MessageShape,
    "responses": ResponseShape,
}
# The fields of a response that repeat its request.
_SHOWN: Final = to_json(parse_body(ResponseBody, b'{"model": "m", "input": "p"}').shown)


def order_of(add: Add, settings: SessionSettings, first: int) -> Order:
    """Return the order whose first request is ``add``; every further prompt has another beginning.

    The front end makes it from the body of a completion; the sampling parameters are then set for each choice.
    """
    if settings.is_native:
        order = native_order(json.dumps(_native_body_of(add, settings)).encode(), SERVED)
    else:
        order = completion_order(json.dumps(_body_of(add, settings)).encode(), SERVED)
    n = settings.choices
    messages = tuple(
        msgspec.structs.replace(message, sampling=sampling_of(_sampling_of(add, first + number, settings), number % n))
        for number, message in enumerate(order.messages)
    )
    seeds = [message.sampling.seed for message in messages[:n]]
    if len(set(seeds)) < n:
        raise Violation(f"the choices of {add.rid} have the seeds {seeds}, and would be alike")
    return msgspec.structs.replace(order, messages=messages, shown_request=_SHOWN)


def _native_body_of(add: Add, settings: SessionSettings) -> dict[str, Any]:
    asks = settings.logprobs and settings.scores
    return {
        "rid": add.rid,
        "input_ids": list(add.prompt_ids),
        "stream": settings.stream,
        "return_logprob": settings.logprobs,
        "top_logprobs_num": settings.tops if settings.logprobs else 0,
        "logprob_start_len": len(add.prompt_ids) // 2 if asks else -1,
        "sampling_params": {
            "n": settings.n,
            "max_new_tokens": add.max_new_tokens,
            "no_stop_trim": settings.shows_stop,
            "skip_special_tokens": not settings.shows_special,
        },
    }


def _body_of(add: Add, settings: SessionSettings) -> dict[str, Any]:
    special = [SPECIAL] if settings.special else []
    prompts = [
        [*special[:index], *(ord("p") + number for number in range(index)), *add.prompt_ids]
        for index in range(settings.prompts)
    ]
    body: dict[str, Any] = {
        "rid": add.rid,
        "prompt": prompts,
        "n": settings.choices,
        "echo": settings.echo,
        "logprobs": settings.tops if settings.logprobs and not (settings.has_blocks and settings.has_parts) else None,
        "return_token_ids": True,
        "return_cached_tokens_details": True,
        "include_stop_str_in_output": settings.shows_stop,
        "skip_special_tokens": not settings.shows_special,
        "max_tokens": add.max_new_tokens,
        "stream": settings.stream,
    }
    if settings.stream and settings.usage != "none":
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": settings.usage == "each"}
    if settings.scores and not (settings.stream or settings.has_blocks):
        body["prompt_logprobs"] = 1
    return body


def model_tokens(add: Add, number: int) -> list[int]:
    """Return the tokens that the model emits for this request: its own output for the first, rotated for the others."""
    output = add.alone(add.max_new_tokens)
    start = number % len(output)
    return [*output[start:], *output[:start]]


def _sampling_of(add: Add, number: int, settings: SessionSettings) -> SamplingParams:
    emitted = byte_tokens(model_tokens(add, number), add.stop_token_ids, settings)
    stops: tuple[str, ...] = _STOPS if add.stop_token_ids and not settings.stop_tokens else ()
    is_odd = bool((number + len(add.prompt_ids)) % 2)
    usual: tuple[str, ...]
    if settings.has_tools:
        usual = _STOPS_IN_CALLS if is_odd else _STOPS_BESIDE_CALLS
    else:
        usual = _stops_in(DECODERS["none"].decode(emitted)) if is_odd else _USUAL_STOPS
    stops += usual if settings.stops and number else ()
    sampling = SamplingParams(max_new_tokens=add.max_new_tokens, stop=stops, seed=7, temperature=0.0)
    if settings.least:
        least = stop_position(emitted, sampling, DECODERS[settings.tools])[0] or 0
        return msgspec.structs.replace(sampling, min_new_tokens=least)
    return sampling


def _stops_in(text: str) -> tuple[str, ...]:
    """Return a stop string that an output contains, over several tokens: right before a stop token, if there is one.

    Otherwise it begins where a letter stands twice, if one does: the text before it may end like its beginning in two
    ways.
    """
    before, found, _ = text.partition(chr(STOP_LETTER))
    if found and before:
        return (before[-2:],)
    text = text.partition(REPLACEMENT)[0]
    start = next((place for place, (one, after) in enumerate(pairwise(text)) if one == after), len(text) // 3)
    stop = text[start : start + _MOST_STOP_CHARS]
    return (stop,) if stop else ()


def shape_of(order: Order, settings: SessionSettings) -> Shape:
    served: Any = SimpleNamespace(**vars(SERVED) | {"tokenizer": DECODERS[settings.tools]})
    if settings.is_native:
        return NativeShape(order.n)
    if settings.protocol == "completions":
        return CompletionShape(order, served)
    return _CHATS[settings.protocol](order, served, lambda: _choice_of(settings))


class CountedShape(Shape):
    """Counts the replies and the pieces of streams that a shape has made."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self.end = shape.end
        self.made = 0

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[object]:
        making = self._shape.whole(answers)
        self.made += 1
        while True:
            try:
                next(making)
            except StopIteration as done:
                return done.value
            yield
            self.made += 1

    def events(self, index: int, piece: GenerateAnswer) -> Iterable[msgspec.Struct]:
        self.made += 1
        return self._shape.events(index, piece)

    def last_events(self) -> Iterable[msgspec.Struct]:
        return self._shape.last_events()

    def failure(self, error: ErrorBody) -> msgspec.Struct:
        return self._shape.failure(error)


def _choice_of(settings: SessionSettings) -> SpokenChoice:
    if not settings.has_parts:
        return SpokenChoice()
    reasoning = ReasoningSplitter(ReasoningStart.OPEN) if settings.reasoning else None
    calls = FAMILIES[settings.tools]((TOOL,)) if settings.has_tools else None
    end = END_OF_REASONING if settings.reasoning else None
    return SpokenChoice(AnswerParser(reasoning, calls, parallel=settings.parallel), end_of_reasoning=end)
