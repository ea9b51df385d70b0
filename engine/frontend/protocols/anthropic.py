"""Anthropic's Messages protocol, translated to and from a chat: request bodies and shapes of replies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
from pydantic import Field, JsonValue
from pydantic_core import from_json, to_json

from engine.core.messages import FinishReason
from engine.frontend.protocols.openai.bodies import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_NAME_CHARS,
    MAX_TOOL_CALLS,
    MAX_TOOLS,
    MAX_USER_CHARS,
    text_of,
)
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
from engine.frontend.protocols.openai.requests import Translation, chat_prompt, order_of_chat, requested_lora
from engine.frontend.protocols.openai.shapes import BlockShape
from engine.frontend.schema.errors import ErrorBody, ErrorType
from engine.frontend.schema.native import (
    MAX_INT32,
    MAX_STOP_STRINGS,
    FreeJson,
    NullableBody,
    RequestFields,
    StopString,
    parse_body,
)
from engine.frontend.sessions.requests import Order, ServedModel

_Nothing = Annotated[list[JsonValue], Field(max_length=0)]


class CacheControl(NullableBody):
    """Has no effect: the prefix cache finds equal prefixes without it."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(NullableBody):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: _Nothing | None = None


class ThinkingBlock(NullableBody):
    """The reasoning of a reply, for templates that show it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    """A call in a reply."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    input: dict[str, FreeJson]


Texts = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ToolResultBlock(_Block):
    """The result of the call with this id."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    content: str | Texts = ""
    is_error: bool = Field(default=False, description="no effect: the model reads the content")


UserBlocks = Annotated[
    list[Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]],
    Field(max_length=MAX_TOOL_CALLS, fail_fast=True),
]
AssistantBlocks = Annotated[
    list[Annotated[TextBlock | ThinkingBlock | ToolUseBlock, Field(discriminator="type")]],
    Field(max_length=MAX_TOOL_CALLS, fail_fast=True),
]


class UserMessage(NullableBody):
    role: Literal["user"]
    content: str | UserBlocks

    def chat_messages(self) -> Iterator[dict[str, Any]]:
        """Yield the results of calls, then the user's text."""
        if isinstance(self.content, str):
            yield {"role": "user", "content": self.content}
            return
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": text_of(block.content)}
        texts = [block for block in self.content if isinstance(block, TextBlock)]
        if texts or not self.content:
            yield {"role": "user", "content": text_of(texts)}


class AssistantMessage(NullableBody):
    role: Literal["assistant"]
    content: str | AssistantBlocks

    def chat_messages(self) -> Iterator[dict[str, Any]]:
        """Yield one message, with its reasoning and its calls."""
        if isinstance(self.content, str):
            yield {"role": "assistant", "content": self.content}
            return
        calls = [block for block in self.content if isinstance(block, ToolUseBlock)]
        yield {
            "role": "assistant",
            "content": text_of([block for block in self.content if isinstance(block, TextBlock)]) or None,
            "reasoning_content": "".join(b.thinking for b in self.content if isinstance(b, ThinkingBlock)) or None,
            "tool_calls": [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.input, ensure_ascii=False)},
                }
                for call in calls
            ]
            or None,
        }


Message = Annotated[UserMessage | AssistantMessage, Field(discriminator="role")]


class MessagesToolBody(_Block):
    """A function that the model may call; server-side tools are not supported."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    input_schema: dict[str, FreeJson]
    strict: bool = Field(default=False, description="every call of it follows its schema")


class AnyToolChoice(NullableBody):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(NullableBody):
    type: Literal["tool"]
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    disable_parallel_tool_use: bool = False


class Thinking(NullableBody):
    """The variable ``enable_thinking`` of the model's chat template. Reasoning has no separate limit."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="not honoured apart from max_tokens")
    display: Literal["summarized", "omitted"] | None = Field(None, description="changes nothing")


class OutputFormat(NullableBody):
    """A schema that the output follows."""

    type: Literal["json_schema"]
    json_schema: dict[str, FreeJson] = Field(alias="schema")


class OutputConfig(NullableBody):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="a hint: sets the variable reasoning_effort of the model's chat template"
    )


class MessagesMetadata(NullableBody):
    user_id: str | None = Field(default=None, max_length=MAX_USER_CHARS, description="named in the debug log")


class CountTokensBody(NullableBody):
    """The body of ``POST /v1/messages/count_tokens``: a conversation."""

    model: str
    messages: Annotated[list[Message], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: str | Texts | None = None
    tools: Annotated[list[MessagesToolBody], Field(fail_fast=True)] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Annotated[AnyToolChoice | NamedToolChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    cache_control: CacheControl | None = None

    @property
    def chat_fields(self) -> dict[str, Any]:
        """Return the equivalent fields of a chat. As in the protocol, a final assistant message is continued."""
        asked, choice = self.output_config.format, self.tool_choice
        system = [] if self.system is None else [{"role": "system", "content": text_of(self.system)}]
        thinking = {} if self.thinking is None else {"enable_thinking": self.thinking.type != "disabled"}
        schema = None if asked is None else {"name": "output", "schema": asked.json_schema}
        continues = isinstance(self.messages[-1], AssistantMessage)
        return {
            "model": self.model,
            "messages": [*system, *(entry for message in self.messages for entry in message.chat_messages())],
            "tools": [
                {
                    "type": "function",
                    "function": {"name": tool.name, "parameters": tool.input_schema, "strict": tool.strict}
                    | ({} if tool.description is None else {"description": tool.description}),
                }
                for tool in self.tools
            ],
            "tool_choice": _choice_of(choice),
            "parallel_tool_calls": choice is None or not choice.disable_parallel_tool_use,
            "response_format": None if schema is None else {"type": "json_schema", "json_schema": schema},
            "reasoning_effort": self.output_config.effort,
            "chat_template_kwargs": thinking,
            "continue_final_message": continues,
        }


class MessagesBody(CountTokensBody, RequestFields):
    """The body of ``POST /v1/messages``."""

    max_tokens: int = Field(ge=1, le=MAX_INT32)
    stop_sequences: Annotated[list[StopString], Field(fail_fast=True)] = Field(default=[], max_length=MAX_STOP_STRINGS)
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=MAX_INT32)
    metadata: MessagesMetadata = MessagesMetadata()
    service_tier: Literal["auto", "standard_only"] = Field("auto", description="there is one tier")

    @property
    def chat_fields(self) -> dict[str, Any]:
        """Return the equivalent fields of a chat, including sampling."""
        same = {*RequestFields.model_fields, "max_tokens"}
        same |= {"temperature", "top_p", "top_k"} & self.model_fields_set
        return super().chat_fields | {
            "stop": self.stop_sequences,
            "user": self.metadata.user_id,
            **{name: getattr(self, name) for name in same},
        }


def _choice_of(choice: AnyToolChoice | NamedToolChoice | None) -> Any:
    if isinstance(choice, NamedToolChoice):
        return {"type": "function", "function": {"name": choice.name}}
    return None if choice is None else {"any": "required"}.get(choice.type, choice.type)


# Error types with another name in the protocol.
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
    """The reasoning as the model wrote it, unsigned."""

    thinking: str
    signature: str = ""


class ToolUseContent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="tool_use"):
    """A call. ``input`` has the arguments, up to the truncation if they were cut off."""

    id: str
    name: str
    input: Any


ContentBlock = TextContent | ThinkingContent | ToolUseContent


class MessagesUsage(msgspec.Struct, frozen=True, kw_only=True):
    """``input_tokens`` counts the prompt tokens that did not come from the prefix cache."""

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
    """The body of an error reply, and the last event of a failed stream."""

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
# Finish reasons with another name in the protocol; the others keep the engine's name.
_REASONS = {FinishReason.STOP: "end_turn", FinishReason.LENGTH: "max_tokens"}


def message_order(data: bytes, served: ServedModel) -> Order:
    """Read the order of a message. Raises ApiError, also if the model has no chat template."""
    chat = _AS_CHAT.chat(parse_body(MessagesBody, data).chat_fields)
    return _AS_CHAT.order(lambda: order_of_chat(chat, served, "msg"))


def token_count(data: bytes, served: ServedModel) -> TokenCount:
    """Count the tokens of a conversation's prompt. Raises ApiError, also if the model has no chat template."""
    chat = _AS_CHAT.chat(parse_body(CountTokensBody, data).chat_fields)
    requested_lora(chat.model, served)
    _, ids = chat_prompt(chat, served)
    return TokenCount(input_tokens=len(ids))


class MessageShape(BlockShape):
    """Shapes a message: each block of the output is a block of the message."""

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
    """Parse the object as far as it is complete; empty for anything but an object."""
    try:
        value = from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        value = {}
    return msgspec.Raw(to_json(value if isinstance(value, dict) else {}, inf_nan_mode="null"))
