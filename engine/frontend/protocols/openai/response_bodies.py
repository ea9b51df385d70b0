"""Bodies of ``/v1/responses``. A conversation is a list of items, which the client stores: the server is stateless.

Owns the rules of these fields and the translation of items to chat messages.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from engine.frontend.protocols.openai.bodies import (
    MAX_CALL_ID_CHARS,
    MAX_MESSAGES,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_NAME_CHARS,
    MAX_TOOLS,
    MAX_USER_CHARS,
    PromptCacheOptions,
    text_of,
)
from engine.frontend.schema.native import (
    MAX_DESCRIPTION_CHARS,
    MAX_INT32,
    MAX_TOP_LOGPROBS,
    FreeJson,
    NullableBody,
    OnlyFalse,
    RequestFields,
    SamplingFields,
    StrictBody,
)

# The value in ``include`` that requests the output's logprobs.
LOGPROBS = "message.output_text.logprobs"
# The longest id of an item in a reply: the reply's id and a number.
MAX_ITEM_ID_CHARS = 512
_Nothing = Annotated[list[JsonValue], Field(max_length=0)]
_Status = Literal["in_progress", "completed", "incomplete"]


class _Given(StrictBody):
    """A part of an earlier reply. Clients send it back with a null for every unset field."""

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, data: Any) -> Any:
        return {name: value for name, value in data.items() if value is not None} if isinstance(data, dict) else data


class InputText(_Given):
    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: _Nothing | None = None
    logprobs: list[FreeJson] | None = Field(None, description="from a reply; no effect")


class RefusalText(_Given):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal's text."""
        return self.refusal


Texts = Annotated[
    list[Annotated[InputText | RefusalText, Field(discriminator="type")]],
    Field(max_length=MAX_MESSAGES, fail_fast=True),
]


class _Item(_Given):
    """An item, perhaps from an earlier reply; its id and status have no effect."""

    id: str | None = Field(None, max_length=MAX_ITEM_ID_CHARS)
    status: _Status | None = None


class MessageItem(_Item):
    """A message of the client or from a reply."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Texts
    phase: str | None = Field(None, max_length=MAX_NAME_CHARS, description="from a reply; no effect")


class FunctionCallItem(_Item):
    """A call in a reply."""

    type: Literal["function_call"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    arguments: str


class FunctionCallOutputItem(_Item):
    """The result of the call with this id."""

    type: Literal["function_call_output"]
    call_id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    output: str | Texts


class ReasoningText(_Given):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(_Item):
    """The reasoning of a reply, for templates that show it."""

    type: Literal["reasoning"]
    summary: Annotated[list[ReasoningText], Field(fail_fast=True)] = Field(default=[], max_length=MAX_MESSAGES)
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] = Field(default=[], max_length=MAX_MESSAGES)
    encrypted_content: None = Field(None, description="not honoured: only null")


def _typed(item: Any) -> Any:
    """Make an item without a type a message."""
    return item | {"type": "message"} if isinstance(item, dict) and item.get("type") is None else item


Item = Annotated[
    Annotated[MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem, Field(discriminator="type")],
    BeforeValidator(_typed),
]


class ResponseToolBody(NullableBody):
    """A function that the model may call; server-side tools are not supported."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, FreeJson] | None = None
    strict: bool = Field(default=False, description="every call of it follows its schema")


class ResponseToolChoice(NullableBody):
    """``tool_choice`` for one function."""

    type: Literal["function"]
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)


class PlainFormat(NullableBody):
    type: Literal["text", "json_object"]


class SchemaFormat(NullableBody):
    """A schema that the output follows, with or without ``strict``."""

    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    description: str | None = Field(None, max_length=MAX_DESCRIPTION_CHARS)
    json_schema: dict[str, FreeJson] = Field(alias="schema")
    strict: bool = True


class TextOptions(NullableBody):
    format: Annotated[PlainFormat | SchemaFormat, Field(discriminator="type")] = PlainFormat(type="text")
    verbosity: Literal["low", "medium", "high"] | None = None


class ReasoningOptions(NullableBody):
    """``effort`` is a hint for the chat template. Reasoning is returned in full, without a summary."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: Literal["auto"] | None = Field(
        default=None, description="'auto': no summary, because all reasoning is returned"
    )
    generate_summary: Literal["auto"] | None = Field(default=None, description="alias of summary")


class ResponseStreamOptions(NullableBody):
    include_obfuscation: bool = Field(default=False, description="no effect: events are not padded")


class ResponseBody(RequestFields, SamplingFields, NullableBody):
    """The body of ``POST /v1/responses``."""

    model: str | None = Field(None, description="the served model's name; left out: the served model")
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: str | None = Field(None, description="a system message before the input")
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    tools: Annotated[list[ResponseToolBody], Field(fail_fast=True)] = Field(default=[], max_length=MAX_TOOLS)
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool = True
    text: TextOptions = TextOptions()
    reasoning: ReasoningOptions = ReasoningOptions()
    stream_options: ResponseStreamOptions | None = None
    chat_template_kwargs: dict[str, FreeJson] = Field(default={}, description="variables of the chat template")
    store: OnlyFalse = Field(default=False, description="nothing is stored: only false, also if left out")
    previous_response_id: None = Field(None, description="nothing is stored: send the items of earlier replies")
    conversation: None = Field(None, description="nothing is stored: send the items of the conversation")
    background: OnlyFalse = Field(default=False, description="nothing is stored: only false")
    prompt: None = Field(None, description="nothing is stored: only null")
    include: list[Literal["message.output_text.logprobs", "reasoning.encrypted_content"]] = Field(
        default=[], max_length=2, description="logprobs of the output tokens; reasoning is always returned in clear"
    )
    truncation: Literal["disabled"] = Field("disabled", description="the input is never truncated")
    top_logprobs: int = Field(
        0,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="number of most likely tokens at each position; needs logprobs in include",
    )
    max_tool_calls: int | None = Field(None, ge=1, description="limit on server-side tools: no effect")
    metadata: dict[str, Annotated[str, Field(max_length=MAX_METADATA_CHARS)]] = Field(
        default={}, max_length=MAX_METADATA, description="returned in the reply"
    )
    service_tier: Literal["auto", "default"] = Field("auto", description="there is one tier")
    user: str | None = Field(None, max_length=MAX_USER_CHARS, description="shown in the debug log with the reply's id")
    safety_identifier: str | None = Field(None, max_length=MAX_USER_CHARS, description="shown like user")
    prompt_cache_key: str | None = Field(None, max_length=MAX_USER_CHARS, description="no effect")
    prompt_cache_options: PromptCacheOptions | None = Field(None, description="no effect")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(None, description="no effect")

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from super().broken_rules()
        if (top := self.top_logprobs) and LOGPROBS not in self.include:
            yield "top_logprobs", f"needs {LOGPROBS!r} in include, got top_logprobs={top} without it; add it"

    @property
    def chat_fields(self) -> dict[str, Any]:
        """Return the equivalent fields of a chat."""
        same = RequestFields.model_fields.keys() | SamplingFields.model_fields.keys()
        same |= {"model", "parallel_tool_calls", "user", "safety_identifier", "chat_template_kwargs"}
        choice = self.tool_choice
        if isinstance(choice, ResponseToolChoice):
            choice_field: Any = {"type": "function", "function": {"name": choice.name}}
        else:
            choice_field = choice
        return {name: getattr(self, name) for name in same & self.model_fields_set} | {
            "messages": list(self._messages()),
            "max_completion_tokens": self.max_output_tokens,
            "tools": [
                {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
                for tool in self.tools
            ],
            "tool_choice": choice_field,
            "response_format": self._format(),
            "reasoning_effort": self.reasoning.effort,
            "verbosity": self.text.verbosity,
            "logprobs": LOGPROBS in self.include,
            "top_logprobs": self.top_logprobs,
        }

    @property
    def shown(self) -> dict[str, Any]:
        """Return the fields that the reply repeats."""
        tools = self.model_dump(include={"tools", "tool_choice", "text"}, by_alias=True)
        same = ("instructions", "max_output_tokens", "metadata", "parallel_tool_calls", "temperature", "top_p", "user")
        shown = {name: getattr(self, name) for name in (*same, "top_logprobs")}
        effort = {"effort": self.reasoning.effort, "summary": None}
        return shown | tools | {"tool_choice": tools["tool_choice"] or "auto", "reasoning": effort}

    def _format(self) -> dict[str, Any]:
        asked = self.text.format
        if isinstance(asked, PlainFormat):
            return {"type": asked.type}
        return {"type": "json_schema", "json_schema": asked.model_dump(exclude={"type"}, by_alias=True)}

    def _messages(self) -> Iterator[dict[str, Any]]:
        """Yield the messages of the chat. A reply is one message: its reasoning, its text and its calls."""
        if self.instructions is not None:
            yield {"role": "system", "content": self.instructions}
        if isinstance(self.input, str):
            yield {"role": "user", "content": self.input}
            return
        answer: dict[str, Any] = {}
        for item in self.input:
            part = _part_of_answer(item)
            if answer and (part is None or answer.keys() & part.keys() - {"tool_calls"}):
                yield {"role": "assistant", "content": None} | answer
                answer = {}
            if part is None:
                yield _message_of(item)
            else:
                answer |= {name: answer.get(name, type(value)()) + value for name, value in part.items()}
        if answer:
            yield {"role": "assistant", "content": None} | answer


def _part_of_answer(item: Item) -> dict[str, Any] | None:
    """Return an item's part of an assistant's message; None if the item is not the assistant's."""
    match item:
        case ReasoningItem():
            return {"reasoning_content": "".join(part.text for part in item.content or item.summary)}
        case FunctionCallItem():
            function = {"name": item.name, "arguments": item.arguments}
            return {"tool_calls": [{"id": item.call_id, "type": "function", "function": function}]}
        case MessageItem(role="assistant"):
            return {"content": text_of(item.content)}
    return None


def _message_of(item: Item) -> dict[str, Any]:
    """Translate an item of the client to a message."""
    if isinstance(item, FunctionCallOutputItem):
        return {"role": "tool", "tool_call_id": item.call_id, "content": text_of(item.output)}
    assert isinstance(item, MessageItem), "the others are parts of replies"
    return {"role": item.role, "content": text_of(item.content)}
