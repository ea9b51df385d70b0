"""``/v1/responses``: the order of a body, and the response, its items, and the events of its stream.

The types have the protocol's names. An unset field is left out; a field that is None is null.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from pydantic_core import to_json

from engine.core.messages import FinishReason
from engine.frontend.protocols.openai.answers import ChatLogprob
from engine.frontend.protocols.openai.chat_blocks import (
    Begun,
    Block,
    BlockKind,
    Change,
    Ended,
    Grown,
    NewChoice,
    SpokenChoice,
)
from engine.frontend.protocols.openai.requests import Translation, order_of_chat
from engine.frontend.protocols.openai.response_bodies import LOGPROBS, ResponseBody
from engine.frontend.protocols.openai.shapes import BlockShape
from engine.frontend.schema.errors import ApiError, ErrorBody
from engine.frontend.schema.native import parse_body
from engine.frontend.sessions.requests import Order, ServedModel
from engine.frontend.sessions.sessions import listed
from engine.frontend.text.answer import TokenTexts

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class OutputText(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: tuple[()] = ()
    logprobs: list[ChatLogprob]


class ReasoningContent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputMessage(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: ItemStatus
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputReasoning(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="reasoning"):
    """The reasoning as the model wrote it, without a summary."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: list[ReasoningContent]


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """A call. ``arguments`` is JSON unless the output was truncated, see ``status``."""

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem = OutputMessage | OutputReasoning | OutputCall


class InputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens whose KV came from the prefix cache."""

    cached_tokens: int


class OutputDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens of reasoning, including markers; 0 if they cannot be distinguished."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """The reason why a response ended early: ``max_output_tokens`` or the engine's finish reason."""

    reason: str


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response. ``created_at`` is in seconds since the epoch. Fields from ``background`` on repeat the request."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "cancelled"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage | None
    incomplete_details: IncompleteDetails | None = None
    error: None = None
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: None = None
    reasoning: dict[str, str | None]
    service_tier: Literal["default"] = "default"
    store: Literal[False] = False
    temperature: float
    text: dict[str, Any]
    tool_choice: Any
    tools: list[Any]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None


class _Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """An event of a stream; ``sequence_number`` counts them."""

    sequence_number: int


class _OfResponse(_Event, frozen=True, kw_only=True):
    response: ResponseAnswer


class ResponseCreated(_OfResponse, frozen=True, kw_only=True, tag="response.created"):
    pass


class ResponseInProgress(_OfResponse, frozen=True, kw_only=True, tag="response.in_progress"):
    pass


class ResponseCompleted(_OfResponse, frozen=True, kw_only=True, tag="response.completed"):
    pass


class ResponseIncomplete(_OfResponse, frozen=True, kw_only=True, tag="response.incomplete"):
    """The end of a response that ended early."""


class _OfItem(_Event, frozen=True, kw_only=True):
    """``output_index`` is the item's position in the response."""

    output_index: int


class ItemAdded(_OfItem, frozen=True, kw_only=True, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_OfItem, frozen=True, kw_only=True, tag="response.output_item.done"):
    item: OutputItem


class _OfPart(_OfItem, frozen=True, kw_only=True):
    item_id: str
    content_index: Literal[0] = 0


class PartAdded(_OfPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    part: OutputText | ReasoningContent


class PartDone(_OfPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    part: OutputText | ReasoningContent


class TextDelta(_OfPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    delta: str
    logprobs: list[ChatLogprob]


class TextDone(_OfPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    text: str
    logprobs: list[ChatLogprob]


class ReasoningDelta(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    delta: str


class ReasoningDone(_OfPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    text: str


class ArgumentsDelta(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"):
    item_id: str
    delta: str


class ArgumentsDone(_OfItem, frozen=True, kw_only=True, tag="response.function_call_arguments.done"):
    item_id: str
    name: str
    arguments: str


class ResponseError(_Event, frozen=True, kw_only=True, tag="error"):
    """The last event of a broken stream."""

    code: str
    message: str
    param: str | None
    error: Any

    @classmethod
    def of(cls, error: ErrorBody, sequence_number: int) -> ResponseError:
        detail = error.error
        code, message, param = str(detail.code), detail.message, detail.param
        return cls(sequence_number=sequence_number, code=code, message=message, param=param, error=detail)


RESPONSE_EVENTS = (
    ResponseCreated, ResponseInProgress, ItemAdded, PartAdded, ReasoningDelta, ReasoningDone, TextDelta, TextDone,
    PartDone, ArgumentsDelta, ArgumentsDone, ItemDone, ResponseCompleted, ResponseIncomplete, ResponseError,
)  # fmt: skip

_AS_CHAT = Translation(
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "verbosity": "text.verbosity",
        "function.parameters": "parameters",
        "function.name": "name",
    }
)
# Bounded, because a stream repeats these fields three times.
MAX_SHOWN_BYTES = 1 << 20
_REASONS = {FinishReason.LENGTH: "max_output_tokens"}
_STATUSES: dict[FinishReason, Literal["completed", "cancelled"]] = {
    FinishReason.STOP: "completed",
    FinishReason.ABORT: "cancelled",
}


def response_order(data: bytes, served: ServedModel) -> Order:
    """Return the order of a response. Raises ApiError, also if the model has no chat template."""
    body = parse_body(ResponseBody, data)
    chat = _AS_CHAT.chat(body.chat_fields)
    left_out = body.shown.keys() - body.model_fields_set
    own = {name: value for name, value in served.sampling_defaults.items() if name in left_out}
    shown = to_json(body.shown | own, inf_nan_mode="null")
    if len(shown) > MAX_SHOWN_BYTES:
        raise ApiError.invalid(
            f"tools, instructions and the other fields that a response repeats must be at most {MAX_SHOWN_BYTES} "
            f"bytes, got {len(shown)}; send less in them",
            param="tools",
        )
    order = _AS_CHAT.order(lambda: order_of_chat(chat, served, "resp"))
    if order.logprobs and order.parsing is not None:
        raise ApiError.invalid(
            f"{LOGPROBS} needs an output of only text, but this one may have reasoning or calls; leave it out, or "
            "send /v1/chat/completions, which has the logprobs of all tokens",
            param="include",
        )
    return msgspec.structs.replace(order, shown_request=shown)


class ResponseShape(BlockShape):
    """Shapes a response: each block of the output is one of its items."""

    def __init__(self, order: Order, served: ServedModel, new_choice: NewChoice = SpokenChoice) -> None:
        super().__init__(new_choice(), TokenTexts(served.tokenizer) if order.logprobs else None)
        self._id = order.rid
        self._head: dict[str, Any] = msgspec.json.decode(order.shown_request, type=dict[str, msgspec.Raw]) | {
            "id": order.rid,
            "created_at": int(time.time()),
            "model": order.lora or served.model_name,
        }
        self._events = 0

    def _answer(self) -> ResponseAnswer:
        reason = self._spoken.end or FinishReason.STOP
        counts = self._counts.usage()
        details = counts.completion_tokens_details
        usage = ResponseUsage(
            input_tokens=counts.prompt_tokens,
            input_tokens_details=InputDetails(cached_tokens=counts.prompt_tokens_details.cached_tokens),
            output_tokens=counts.completion_tokens,
            output_tokens_details=OutputDetails(reasoning_tokens=details.reasoning_tokens if details else 0),
            total_tokens=counts.total_tokens,
        )
        return ResponseAnswer(
            **self._head,
            status=_STATUSES.get(reason, "incomplete"),
            output=[self._item(block, self._status(block)) for block in self._spoken.blocks],
            usage=usage,
            incomplete_details=None
            if reason is FinishReason.STOP
            else IncompleteDetails(reason=_REASONS.get(reason, reason.value)),
        )

    def _first_events(self) -> Iterator[msgspec.Struct]:
        answer = ResponseAnswer(**self._head, status="in_progress", output=[], usage=None)
        yield ResponseCreated(sequence_number=self._next(), response=answer)
        yield ResponseInProgress(sequence_number=self._next(), response=answer)

    def last_events(self) -> Iterator[msgspec.Struct]:
        answer = self._answer()
        event = ResponseCompleted if answer.status == "completed" else ResponseIncomplete
        yield event(sequence_number=self._next(), response=answer)

    def failure(self, error: ErrorBody) -> msgspec.Struct:
        return ResponseError.of(error, self._next())

    def _shown(self, change: Change) -> Iterator[msgspec.Struct]:
        block = change.block
        place: dict[str, Any] = {"output_index": block.index, "item_id": self._item_id(block)}
        match change:
            case Begun():
                added = self._item(block, "in_progress")
                yield ItemAdded(sequence_number=self._next(), output_index=block.index, item=added)
                if block.kind is not BlockKind.CALL:
                    yield PartAdded(sequence_number=self._next(), **place, part=_part(block))
            case Grown(text=text, logprobs=logprobs):
                more = {"logprobs": listed(logprobs)} if block.kind is BlockKind.TEXT else {}
                yield _DELTAS[block.kind](sequence_number=self._next(), **place, delta=text, **more)
            case Ended():
                if block.kind is BlockKind.CALL:
                    yield ArgumentsDone(sequence_number=self._next(), **place, name=block.name, arguments=block.text)
                else:
                    if block.kind is BlockKind.TEXT:
                        logprobs = listed(*block.logprobs)
                        yield TextDone(sequence_number=self._next(), **place, text=block.text, logprobs=logprobs)
                    else:
                        yield ReasoningDone(sequence_number=self._next(), **place, text=block.text)
                    yield PartDone(sequence_number=self._next(), **place, part=_part(block))
                item = self._item(block, self._status(block))
                yield ItemDone(sequence_number=self._next(), output_index=block.index, item=item)

    def _status(self, block: Block) -> ItemStatus:
        return "incomplete" if self._spoken.is_cut(block) else "completed"

    def _item(self, block: Block, status: ItemStatus) -> OutputItem:
        item_id = self._item_id(block)
        match block.kind:
            case BlockKind.CALL:
                return OutputCall(
                    id=item_id, status=status, call_id=block.call_id, name=block.name, arguments=block.text
                )
            case BlockKind.REASONING:
                content = [ReasoningContent(text=block.text)] if block.written else []
                return OutputReasoning(id=item_id, status=status, content=content)
            case BlockKind.TEXT:
                texts = [_output_text(block)] if block.written else []
                return OutputMessage(id=item_id, status=status, content=texts)

    def _item_id(self, block: Block) -> str:
        return f"{_PREFIXES[block.kind]}_{self._id}_{block.index}"

    def _next(self) -> int:
        self._events += 1
        return self._events - 1


_DELTAS: dict[BlockKind, type[TextDelta | ReasoningDelta | ArgumentsDelta]] = {
    BlockKind.TEXT: TextDelta,
    BlockKind.REASONING: ReasoningDelta,
    BlockKind.CALL: ArgumentsDelta,
}
_PREFIXES = {BlockKind.TEXT: "msg", BlockKind.REASONING: "rs", BlockKind.CALL: "fc"}


def _part(block: Block) -> OutputText | ReasoningContent:
    return _output_text(block) if block.kind is BlockKind.TEXT else ReasoningContent(text=block.text)


def _output_text(block: Block) -> OutputText:
    return OutputText(text=block.text, logprobs=listed(*block.logprobs))
