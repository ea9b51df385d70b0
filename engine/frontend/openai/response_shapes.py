"""Answers of the engine in the shape of ``/v1/responses``, whole and as the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import msgspec
from pydantic_core import to_json

from engine.frontend.errors import ApiError, ErrorBody
from engine.frontend.openai.blocks import Begun, Block, BlockKind, BlockShape, Change, Ended, Grown
from engine.frontend.openai.requests import order_of_chat
from engine.frontend.openai.response_answers import (
    ArgumentsDelta,
    ArgumentsDone,
    IncompleteDetails,
    InputDetails,
    ItemAdded,
    ItemDone,
    ItemStatus,
    OutputCall,
    OutputDetails,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    PartAdded,
    PartDone,
    ReasoningContent,
    ReasoningDelta,
    ReasoningDone,
    ResponseAnswer,
    ResponseCompleted,
    ResponseCreated,
    ResponseError,
    ResponseIncomplete,
    ResponseInProgress,
    ResponseUsage,
    TextDelta,
    TextDone,
)
from engine.frontend.openai.response_bodies import LOGPROBS, ResponseBody
from engine.frontend.openai.spoken import SpokenChoice
from engine.frontend.openai.translated import Translation
from engine.frontend.protocol import parse_body
from engine.frontend.requests import Order, ServedModel
from engine.frontend.sessions import listed
from engine.frontend.token_texts import TokenTexts
from engine.messages import FinishReason

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
# A stream has them three times.
MAX_SHOWN_BYTES = 1 << 20
_REASONS = {FinishReason.LENGTH: "max_output_tokens"}
_STATUSES: dict[FinishReason, Literal["completed", "cancelled"]] = {
    FinishReason.STOP: "completed",
    FinishReason.ABORT: "cancelled",
}


def response_order(data: bytes, served: ServedModel) -> Order:
    """The order of a response. Raises ApiError, also when the model has no chat template."""
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
            f"{LOGPROBS} needs an answer of text alone, and this one may have reasoning or calls; leave it out, or "
            "send /v1/chat/completions, which has the logprobs of all tokens",
            param="include",
        )
    return msgspec.structs.replace(order, shown_request=shown)


class ResponseShape(BlockShape):
    """Each block of the answer is an item of the response."""

    def __init__(self, order: Order, served: ServedModel, new_choice: Callable[[], SpokenChoice] | None = None) -> None:
        super().__init__(new_choice, TokenTexts(served.tokenizer) if order.logprobs else None)
        self._id = order.rid
        self._head: dict[str, Any] = msgspec.json.decode(order.shown_request, type=dict[str, msgspec.Raw]) | {
            "id": order.rid,
            "created_at": int(time.time()),
            "model": order.lora or served.model_name,
        }
        self._events = 0

    def _answer(self) -> ResponseAnswer:
        reason = self._reason or FinishReason.STOP
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
            output=[self._item(block, self._status(block)) for block in self._blocks],
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
        return "incomplete" if self._is_cut(block) else "completed"

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
