"""What clients of the Messages protocol get: a message, its blocks, and the events of its stream."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import msgspec
from pydantic_core import from_json, to_json

from engine.frontend.anthropic.bodies import CountTokensBody, MessagesBody
from engine.frontend.errors import ErrorBody, ErrorType
from engine.frontend.openai.requests import Translation, chat_prompt, order_of_chat, requested_lora
from engine.frontend.openai.shapes import BlockShape
from engine.frontend.openai.spoken import Begun, Block, BlockKind, Change, Ended, Grown, NewChoice, SpokenChoice
from engine.frontend.protocol import parse_body
from engine.frontend.requests import Order, ServedModel
from engine.messages import FinishReason

# Types of errors that have another name in the protocol.
_ERROR_TYPES = {
    ErrorType.NOT_FOUND: "not_found_error",
    ErrorType.BUSY: "rate_limit_error",
    ErrorType.UNAVAILABLE: "overloaded_error",
    ErrorType.ENGINE: "api_error",
    ErrorType.TIMEOUT: "timeout_error",
    ErrorType.TIME_LIMIT: "timeout_error",
    ErrorType.MEDIA_TYPE: ErrorType.INVALID,
    ErrorType.DUPLICATE: ErrorType.INVALID,
}


class TextContent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text"):
    text: str


class ThinkingContent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking"):
    """Reasoning as the model wrote it; nothing signs it."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call. Of arguments that were cut ``input`` has what is whole."""

    id: str
    name: str
    input: Any


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` are those of the prompt that were not read from the prefix cache."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int


class MessageAnswer(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message"):
    id: str
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[ContentBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessagesUsage


class TokenCount(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/v1/messages/count_tokens``."""

    input_tokens: int


class MessageStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_start"):
    message: MessageAnswer


class BlockStart(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_start"):
    index: int
    content_block: ContentBlock


class TextGrowth(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="text_delta"):
    text: str


class ThinkingGrowth(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="thinking_delta"):
    thinking: str


class InputGrowth(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="input_json_delta"):
    partial_json: str


class BlockGrowth(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_delta"):
    index: int
    delta: TextGrowth | ThinkingGrowth | InputGrowth


class BlockStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="content_block_stop"):
    index: int


class MessageEnd(msgspec.Struct, frozen=True, kw_only=True):
    stop_reason: str | None
    stop_sequence: str | None


class MessageGrowth(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_delta"):
    delta: MessageEnd
    usage: MessagesUsage


class MessageStop(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="message_stop"):
    pass


class MessagesError(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="error"):
    """The body of an answer that is no success, and the last event of a stream that broke."""

    error: Any
    request_id: str | None

    @classmethod
    def of(cls, error: ErrorBody) -> MessagesError:
        detail = error.error
        named = msgspec.structs.replace(detail, type=_ERROR_TYPES.get(detail.type, detail.type))
        return cls(error=named, request_id=detail.request_id)


MESSAGE_EVENTS = (MessageStart, BlockStart, BlockGrowth, BlockStop, MessageGrowth, MessageStop, MessagesError)

_AS_CHAT = Translation(
    {
        "max_completion_tokens": "max_tokens",
        "response_format.json_schema": "output_config.format",
        "response_format": "output_config.format",
        "reasoning_effort": "output_config.effort",
        "function.parameters": "input_schema",
        "function.name": "name",
        "stop": "stop_sequences",
        "chat_template_kwargs": "thinking",
    }
)
# Ends that have another name in the protocol; the others keep the engine's.
_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


def message_order(data: bytes, served: ServedModel) -> Order:
    """The order of a message. Raises ApiError, also when the model has no chat template."""
    chat = _AS_CHAT.chat(parse_body(MessagesBody, data).chat_fields)
    return _AS_CHAT.order(lambda: order_of_chat(chat, served, "msg"))


def token_count(data: bytes, served: ServedModel) -> TokenCount:
    """The tokens of a conversation's prompt. Raises ApiError, also when the model has no chat template."""
    chat = _AS_CHAT.chat(parse_body(CountTokensBody, data).chat_fields)
    requested_lora(chat.model, served)
    _, ids = chat_prompt(chat, served)
    return TokenCount(input_tokens=len(ids))


class MessageShape(BlockShape):
    """Each block of the answer is a block of the message."""

    def __init__(self, order: Order, served: ServedModel, new_choice: NewChoice = SpokenChoice) -> None:
        super().__init__(new_choice())
        self._head: dict[str, Any] = {"id": order.rid, "model": order.lora or served.model_name}

    def _answer(self) -> MessageAnswer:
        end = self._end
        return MessageAnswer(
            **self._head,
            content=[_content(block) for block in self._spoken.blocks],
            stop_reason=end.stop_reason,
            stop_sequence=end.stop_sequence,
            usage=self._usage,
        )

    def _first_events(self) -> Iterator[msgspec.Struct]:
        yield MessageStart(message=self._answer())

    def last_events(self) -> Iterator[msgspec.Struct]:
        yield MessageGrowth(delta=self._end, usage=self._usage)
        yield MessageStop()

    def failure(self, error: ErrorBody) -> msgspec.Struct:
        return MessagesError.of(error)

    def _shown(self, change: Change) -> Iterator[msgspec.Struct]:
        block = change.block
        match change:
            case Begun():
                yield BlockStart(index=block.index, content_block=_content(block))
            case Grown(text=text):
                yield BlockGrowth(index=block.index, delta=_growth(block, text))
            case Ended():
                yield BlockStop(index=block.index)

    @property
    def _end(self) -> MessageEnd:
        reason, meta = self._spoken.end, self._meta
        if reason is None or meta is None:
            return MessageEnd(stop_reason=None, stop_sequence=None)
        if reason is FinishReason.STOP and isinstance(meta.matched_stop, str):
            return MessageEnd(stop_reason="stop_sequence", stop_sequence=meta.matched_stop)
        if reason is FinishReason.STOP and any(block.kind is BlockKind.CALL for block in self._spoken.blocks):
            return MessageEnd(stop_reason="tool_use", stop_sequence=None)
        return MessageEnd(stop_reason=_REASONS.get(reason, reason.value), stop_sequence=None)

    @property
    def _usage(self) -> MessagesUsage:
        counts = self._counts.usage()
        cached = counts.prompt_tokens_details.cached_tokens
        return MessagesUsage(
            input_tokens=counts.prompt_tokens - cached,
            cache_read_input_tokens=cached,
            output_tokens=counts.completion_tokens,
        )


def _content(block: Block) -> ContentBlock:
    match block.kind:
        case BlockKind.TEXT:
            return TextContent(text=block.text)
        case BlockKind.REASONING:
            return ThinkingContent(thinking=block.text)
        case BlockKind.CALL:
            return ToolUseContent(id=block.call_id, name=block.name, input=_input_of(block.text))


def _growth(block: Block, text: str) -> TextGrowth | ThinkingGrowth | InputGrowth:
    match block.kind:
        case BlockKind.TEXT:
            return TextGrowth(text=text)
        case BlockKind.REASONING:
            return ThinkingGrowth(thinking=text)
        case BlockKind.CALL:
            return InputGrowth(partial_json=text)


def _input_of(arguments: str) -> msgspec.Raw:
    """The object that was written, as far as it was; what is none is empty."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = {}
    return msgspec.Raw(to_json(value if isinstance(value, dict) else {}, inf_nan_mode="null"))
