"""What clients of the Messages protocol may send, and the chat that it is."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, JsonValue

from engine.frontend.openai.bodies import MAX_MESSAGES, MAX_TOOL_CALLS, MAX_USER_CHARS, text_of
from engine.frontend.openai.tool_bodies import MAX_CALL_ID_CHARS, MAX_NAME_CHARS, MAX_TOOLS
from engine.frontend.protocol import MAX_INT32, MAX_STOP_STRINGS, NullableBody, RequestFields, StopString

_Nothing = Annotated[list[JsonValue], Field(max_length=0)]


class CacheControl(NullableBody):
    """Equal prefixes are found without it, so it changes nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class _Block(NullableBody):
    cache_control: CacheControl | None = None


class TextBlock(_Block):
    type: Literal["text"]
    text: str
    citations: _Nothing | None = None


class ThinkingBlock(NullableBody):
    """The reasoning of an answer, for templates that show it."""

    type: Literal["thinking"]
    thinking: str
    signature: str = ""


class ToolUseBlock(_Block):
    """A call that an answer made."""

    type: Literal["tool_use"]
    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    input: dict[str, JsonValue]


Texts = Annotated[list[TextBlock], Field(max_length=MAX_MESSAGES, fail_fast=True)]


class ToolResultBlock(_Block):
    """What the call with this id gave."""

    type: Literal["tool_result"]
    tool_use_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    content: str | Texts = ""
    is_error: bool = Field(default=False, description="changes nothing: the model reads the content")


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
        """The results of calls, then what the user says."""
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
        """One message, with its reasoning and its calls."""
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
    """A function that the model may call; tools that a server runs itself are not served."""

    type: Literal["custom"] = "custom"
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    input_schema: dict[str, JsonValue]
    strict: bool = Field(default=False, description="every call of it keeps to its schema")


class AnyToolChoice(NullableBody):
    type: Literal["auto", "any", "none"]
    disable_parallel_tool_use: bool = False


class NamedToolChoice(NullableBody):
    type: Literal["tool"]
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    disable_parallel_tool_use: bool = False


class Thinking(NullableBody):
    """The variable ``enable_thinking`` of the model's chat template; how long it thinks is not bounded apart."""

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT32, description="not honoured apart from max_tokens")
    display: Literal["summarized", "omitted"] | None = Field(None, description="changes nothing")


class OutputFormat(NullableBody):
    """A schema that the answer keeps to."""

    type: Literal["json_schema"]
    json_schema: dict[str, JsonValue] = Field(alias="schema")


class OutputConfig(NullableBody):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = Field(
        default=None, description="a hint: the variable reasoning_effort of the model's chat template"
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
        """The fields of the chat that this is. A last message of the assistant is continued, as the protocol has it."""
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
        """With its sampling."""
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
