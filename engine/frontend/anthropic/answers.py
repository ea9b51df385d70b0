"""What clients of the Messages protocol get: a message, its blocks, and the events of its stream. Shapes only."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.frontend.errors import ErrorBody, ErrorType

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
