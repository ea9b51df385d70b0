"""Request bodies of the OpenAI protocol: every field is honoured, or refused with 400.

Owns the rules of single fields and between fields. A field of the protocol that this engine cannot honour is accepted
with values that have no effect, because many clients send them. A chat template gets the arguments of a call as an
object if they are one, because most templates write JSON themselves.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, JsonValue
from pydantic_core import from_json

from engine.core.messages import Grammar, GrammarKind, SamplingParams
from engine.frontend.schema.errors import FieldError
from engine.frontend.schema.foreign_fields import FOREIGN_FIELDS
from engine.frontend.schema.native import (
    MAX_INT32,
    MAX_N,
    MAX_RID_CHARS,
    MAX_TOP_LOGPROBS,
    Choices,
    FreeJson,
    GrammarText,
    JsonObjectFormat,
    JsonSchemaFormat,
    NullableBody,
    OnlyFalse,
    RequestFields,
    RuledBody,
    SamplingFields,
    Schema,
    StrictBody,
    StructuredOutputs,
    TextFormat,
    TokenIds,
    choice_grammar,
    grammar_among,
)
from engine.frontend.text.tools.call_grammar import OfferedTool
from engine.grammar.source import schema_grammar

MAX_TOOLS = 1024
MAX_NAME_CHARS = 256
MAX_CALL_ID_CHARS = 256
MAX_PROMPTS = 128
MAX_MESSAGES = 4096
MAX_USER_CHARS = 256
MAX_TOOL_CALLS = 1024
MAX_METADATA = 16
MAX_METADATA_CHARS = 512
# The protocol's default for completions; a chat may fill the context.
DEFAULT_COMPLETION_TOKENS = 16
# Arguments of the rendering itself, which are not template variables.
TEMPLATE_ARGUMENTS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "conversations",
    "documents",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "sanitize_control_tokens",
    "self",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


class StreamOptions(NullableBody):
    """``stream_options``: ``include_usage`` adds a last event with the token counts."""

    include_usage: bool = False
    continuous_usage_stats: bool = Field(default=False, description="the token counts so far in each event")
    include_obfuscation: OnlyFalse = Field(default=False, description="not honoured: only false")


class PromptCacheOptions(NullableBody):
    """``prompt_cache_options``, accepted for clients of other servers: here the cache finds all equal prefixes."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: str | None = Field(None, max_length=MAX_USER_CHARS)


class OpenAiBody(RequestFields, SamplingFields, NullableBody):
    """The fields that both protocols share, including common extensions."""

    foreign = FOREIGN_FIELDS
    model: str | None = Field(None, description="the served model's name; left out: the served model")
    stream_options: StreamOptions | None = Field(None, description="only with stream=true")
    n: int = Field(1, ge=1, le=MAX_N, description="choices for each prompt; each uses the next seed after a given one")
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    min_tokens: int = Field(0, ge=0, le=MAX_INT32)
    user: str | None = Field(None, max_length=MAX_USER_CHARS, description="shown in the debug log with the reply's id")
    safety_identifier: str | None = Field(None, max_length=MAX_USER_CHARS, description="shown like user")
    prompt_cache_key: str | None = Field(
        None, max_length=MAX_USER_CHARS, description="no effect: equal prefixes are found without a key"
    )
    prompt_cache_options: PromptCacheOptions | None = Field(None, description="no effect, like the key")
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = Field(
        None, description="no effect: the cache evicts the least recently used prefixes"
    )
    response_format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat | None, Field(discriminator="type")] = (
        None
    )
    guided_json: Schema | None = Field(None, description="the output is JSON of this schema")
    guided_regex: GrammarText | None = Field(None, description="the whole output matches this")
    guided_choice: Choices | None = Field(None, description="the output is one of these")
    guided_grammar: GrammarText | None = Field(None, description="the output follows this grammar, in GBNF or Lark")
    structured_outputs: StructuredOutputs | None = Field(None, description="the newer spelling of the guided fields")
    store: OnlyFalse = Field(default=False, description="nothing is stored: only false")
    metadata: dict[str, Annotated[str, Field(max_length=MAX_METADATA_CHARS)]] | None = Field(
        None, max_length=MAX_METADATA, description="no effect: metadata of stored replies, and nothing is stored"
    )
    service_tier: Literal["auto", "default"] = Field("auto", description="there is one tier")
    skip_special_tokens: bool = Field(default=True, description="false: the text shows special tokens of the output")
    add_special_tokens: bool | None = Field(
        None, description="add special tokens around the prompt; left out: only for completions, not for chats"
    )
    include_stop_str_in_output: bool = Field(default=False, description="a text ends with its stop string")
    truncate_prompt_tokens: int | None = Field(
        None,
        ge=-1,
        le=MAX_INT32,
        description="keep only this many tokens at the end of each prompt; -1: as many as fit",
    )
    return_cached_tokens_details: bool = Field(default=False, description="return the cached prompt tokens by tier")
    return_token_ids: bool = Field(default=False, description="return the token ids of prompt and output")
    request_id: str | None = Field(None, min_length=1, max_length=MAX_RID_CHARS, description="alias of rid")
    prompt_logprobs: int | None = Field(
        None,
        ge=0,
        le=MAX_TOP_LOGPROBS,
        description="return the logprob of each prompt token, and of this many most likely tokens; not in a stream",
    )

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from super().broken_rules()
        most, top = self.max_new_tokens, self.prompt_logprobs
        if self.truncate_prompt_tokens == 0:
            yield "truncate_prompt_tokens", "must be >= 1, or -1 for as many as fit, got 0; raise it"
        if self.rid is not None and self.request_id not in (None, self.rid):
            yield "request_id", f"and rid are aliases, got {self.request_id!r} and {self.rid!r}; send one of them"
        if self.stream_options is not None and not self.stream:
            yield "stream_options", "needs stream=true, got it without; remove it or set stream"
        if top is not None and self.stream:
            yield (
                "prompt_logprobs",
                f"needs stream=false, got prompt_logprobs={top} in a stream; leave out one of the two",
            )
        if most is not None and self.min_tokens > most:
            yield "min_tokens", f"must be <= max_tokens={most}, got {self.min_tokens}; lower it or raise max_tokens"
        grammar_among(self._grammars)

    @cached_property
    def _grammars(self) -> dict[str, Grammar | None]:
        """Return the grammar of each field that restricts the output."""
        return {
            "response_format": None if self.response_format is None else self.response_format.grammar,
            "guided_json": None if self.guided_json is None else schema_grammar(self.guided_json),
            "guided_regex": None if self.guided_regex is None else Grammar(GrammarKind.REGEX, self.guided_regex),
            "guided_choice": None if self.guided_choice is None else choice_grammar(self.guided_choice),
            "guided_grammar": None if self.guided_grammar is None else Grammar(GrammarKind.EBNF, self.guided_grammar),
        } | ({} if self.structured_outputs is None else self.structured_outputs.grammars)

    @property
    def grammar(self) -> tuple[str, Grammar] | None:
        """Return the grammar of the output, with the field that requests it."""
        return grammar_among(self._grammars)

    @property
    def max_new_tokens(self) -> int | None:
        """Return the limit on output tokens, from either field; None without one."""
        return self.max_tokens

    @property
    def top_of_prompt(self) -> int | None:
        """Return the number of most likely tokens at each position of the prompt; None for no prompt logprobs."""
        return self.prompt_logprobs

    @property
    def shown_of_prompt(self) -> int:
        """Return the number of logprobs that a reply shows for each prompt token, over all choices; in a stream over
        one.
        """
        return 1 + (self.top_of_prompt or 0)

    @property
    def default_new_tokens(self) -> int | None:
        """Return the default limit on output tokens; None for the remaining context."""
        return None

    @property
    def asked_tokens(self) -> dict[str, int]:
        """The limits on output tokens that the client set, by field."""
        asked = {"max_tokens": self.max_tokens, "min_tokens": self.min_tokens or None}
        return {name: tokens for name, tokens in asked.items() if tokens is not None}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def continuous_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.continuous_usage_stats

    def sampling(self, max_new_tokens: int, defaults: Mapping[str, float]) -> SamplingParams:
        """Build the sampling parameters that all choices share, except for their seeds."""
        return self.sampling_params(max_new_tokens, self.min_tokens, self.grammar, defaults)


# Several prompts, as texts or as token ids.
Prompts = Annotated[list[str], Field(fail_fast=True)] | Annotated[list[TokenIds], Field(fail_fast=True)]


def each_prompt(given: str | list[int] | list[str] | list[list[int]]) -> list[str | list[int]]:
    """Return one prompt or several as a list."""
    if isinstance(given, str):
        return [given]
    ids = [entry for entry in given if isinstance(entry, int)]
    return [ids] if ids else [entry for entry in given if not isinstance(entry, int)]


class CompletionBody(OpenAiBody):
    """The body of ``POST /v1/completions``. ``prompt`` is one text or many, or token ids of one prompt or many."""

    prompt: str | TokenIds | Annotated[Prompts, Field(max_length=MAX_PROMPTS)]
    logprobs: int | None = Field(
        None, ge=0, le=MAX_TOP_LOGPROBS, description="number of most likely tokens to return, beside the chosen one"
    )
    best_of: int | None = Field(None, ge=1, le=MAX_N, description="not honoured: only 1, or n")
    max_tokens: int | None = Field(None, ge=0, le=MAX_INT32, description="0: only compute and cache the prompt")
    echo: bool = Field(default=False, description="begin each text, and its logprobs, with the prompt")
    suffix: Literal[""] | None = Field(None, description="not honoured: only null, or an empty text")

    @property
    def default_new_tokens(self) -> int:
        return DEFAULT_COMPLETION_TOKENS

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from super().broken_rules()
        if len(self.prompts) * self.n > MAX_N:
            raise FieldError(
                "n",
                f"prompts times n must be at most {MAX_N} choices, got {len(self.prompts)} times {self.n}; "
                "send several requests",
            )
        if self.echo and self.truncate_prompt_tokens is not None:
            yield "echo", "needs the whole prompt, got truncate_prompt_tokens too; leave out one of them"
        if not self.prompts:
            yield "prompt", "must hold at least 1 prompt, got an empty list; send a text or token ids"
        if self.best_of not in (None, 1, self.n):
            yield (
                "best_of",
                f"must be 1 or n={self.n}, because every computed choice is returned, got {self.best_of}; use n",
            )

    @property
    def top_of_prompt(self) -> int | None:
        """Return the larger of ``prompt_logprobs`` and, for an echoed prompt, ``logprobs``."""
        wanted = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((number for number in wanted if number is not None), default=None)

    @property
    def shown_of_prompt(self) -> int:
        """Count the logprobs of the prompt and of its echo over all choices; in a stream each choice counts alone."""
        shown = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return sum(1 + top for top in shown if top is not None) * (1 if self.stream else self.n)

    @property
    def prompts(self) -> list[str | list[int]]:
        return each_prompt(self.prompt)


class FunctionBody(NullableBody):
    """A function that the model may call. ``parameters`` is the JSON schema of its arguments; left out, it has none."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    description: str | None = None
    parameters: dict[str, FreeJson] | None = None
    strict: bool = Field(default=False, description="every call of it follows its schema; required calls always do")


class ToolBody(NullableBody):
    type: Literal["function"]
    function: FunctionBody

    @property
    def offered(self) -> OfferedTool:
        function = self.function
        return OfferedTool(name=function.name, parameters=function.parameters, strict=function.strict)

    @property
    def for_template(self) -> dict[str, Any]:
        """Return the tool for a chat template: only the fields that models were trained on."""
        function: dict[str, Any] = {"name": self.function.name}
        if self.function.description is not None:
            function["description"] = self.function.description
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": self.type, "function": function}


class NamedFunctionBody(NullableBody):
    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)


class NamedToolBody(NullableBody):
    """``tool_choice`` for one function."""

    type: Literal["function"]
    function: NamedFunctionBody


ToolChoice = Literal["none", "auto", "required"] | NamedToolBody


class CalledFunctionBody(NullableBody):
    """The function that was called, and its arguments as the model wrote them."""

    name: str = Field(min_length=1, max_length=MAX_NAME_CHARS)
    arguments: str


class ToolCallBody(NullableBody):
    """A call in an assistant's message. ``index``, from pieces of a stream, has no effect."""

    id: str = Field(min_length=1, max_length=MAX_CALL_ID_CHARS)
    type: Literal["function"] = "function"
    function: CalledFunctionBody
    index: int | None = None

    @property
    def for_template(self) -> dict[str, Any]:
        """Return the call for a chat template. Arguments that are not an object, such as truncated ones, stay text."""
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments)}
        return {"id": self.id, "type": self.type, "function": function}


def unknown_tools(tools: Sequence[ToolBody], choice: str | NamedToolBody | None) -> Iterator[tuple[str, str]]:
    """Yield the rules broken by two tools with the same name, and by a choice that no tool can satisfy."""
    names = [tool.function.name for tool in tools]
    twice = next((name for name, count in Counter(names).items() if count > 1), None)
    if twice is not None:
        yield "tools", f"must have different names, got {twice!r} twice; rename one"
    if choice in (None, "none", "auto"):
        return
    if not tools:
        asked = "" if isinstance(choice, str) else f" for the function {choice.function.name!r}"
        yield "tool_choice", f"needs tools{asked}, but there are none; send tools or leave it out"
    if isinstance(choice, NamedToolBody) and choice.function.name not in names:
        known = ", ".join(map(repr, names))
        yield "tool_choice", f"must name one of the tools ({known}), got {choice.function.name!r}; name one"


def _arguments(written: str) -> JsonValue:
    """Parse the arguments: missing ones become an empty object, and text that is not an object stays text."""
    if not written.strip():
        return {}
    try:
        value: JsonValue = from_json(written, allow_inf_nan=False)
    except ValueError:
        return written
    return value if isinstance(value, dict) else written


class TextPart(StrictBody):
    type: Literal["text"]
    text: str


class _HasText(Protocol):
    @property
    def text(self) -> str: ...


def text_of(content: str | Sequence[_HasText]) -> str:
    """Return the text of a message's content; each part starts a new line."""
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


class ChatMessageBody(RuledBody, NullableBody):
    """One message. The fields of a reply's message are accepted, so that it can be sent back unchanged.

    ``developer`` is the protocol's newer name for ``system``. Templates that use them get a speaker's name and the
    reasoning of earlier replies, a field with two spellings.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(max_length=MAX_MESSAGES), Field(fail_fast=True)] | None = Field(
        None, description="may be null only for an assistant"
    )
    name: str | None = Field(None, min_length=1, max_length=MAX_USER_CHARS)
    refusal: None = None
    tool_calls: Annotated[list[ToolCallBody], Field(max_length=MAX_TOOL_CALLS), Field(fail_fast=True)] | None = Field(
        None, description="calls of an assistant"
    )
    tool_call_id: str | None = Field(
        None, min_length=1, max_length=MAX_CALL_ID_CHARS, description="id of the call that a tool's message answers"
    )
    reasoning_content: str | None = Field(None, description="an assistant's reasoning")
    reasoning: str | None = Field(None, description="another spelling of reasoning_content")
    function_call: None = None
    audio: None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if self.content is None and self.role != "assistant":
            yield "content", f"must be given with role {self.role!r}, got null; send a text"
        if self.role == "tool" and self.tool_call_id is None:
            yield "tool_call_id", "must be given with role 'tool', got null; send the id of the call"
        owners = {"tool_call_id": "tool", "tool_calls": "assistant", "reasoning_content": "assistant"}
        for field, owner in (owners | {"reasoning": "assistant"}).items():
            if getattr(self, field) and self.role != owner:
                yield field, f"must be left out with role {self.role!r}: it is only for {owner!r}"

    @property
    def text(self) -> str:
        """Return the content as text; None becomes the empty text, because templates require a text."""
        return text_of(self.content or "")

    @property
    def for_template(self) -> dict[str, Any]:
        """Return the message for a chat template. Templates test whether a key exists, so unset keys are left out."""
        reasoning = self.reasoning_content or self.reasoning
        calls = [call.for_template for call in self.tool_calls or ()]
        extra = {"name": self.name, "tool_calls": calls, "tool_call_id": self.tool_call_id}
        message = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        return message | {key: value for key, value in (extra | {"reasoning_content": reasoning}).items() if value}


class ChatBody(OpenAiBody):
    """The body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessageBody], Field(fail_fast=True)] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT32)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS, description="only with logprobs=true")
    chat_template_kwargs: dict[str, FreeJson] = Field(
        default={}, description="variables of the model's chat template, such as enable_thinking"
    )
    add_generation_prompt: bool | None = Field(
        None, description="false: the prompt ends with the last message; left out: false if that message is continued"
    )
    continue_final_message: bool = Field(default=False, description="the output continues the last message")
    documents: Annotated[list[dict[str, FreeJson]], Field(max_length=MAX_MESSAGES)] = Field(
        default=[], description="for a chat template that shows documents"
    )
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] = Field(
        default=[], max_length=MAX_TOOLS, description="functions that the model may call"
    )
    tool_choice: ToolChoice | None = Field(
        None, description="left out: 'auto' if there are tools; 'none': the model does not see the tools"
    )
    parallel_tool_calls: bool = Field(default=True, description="false: calls after the first are left out")
    functions: Annotated[list[JsonValue], Field(max_length=0)] | None = Field(
        None, description="not honoured: only empty; use tools"
    )
    function_call: Literal["none", "auto"] | None = Field(None, description="no effect without functions")
    modalities: list[Literal["text"]] = Field(default=["text"], min_length=1, max_length=1, description="text only")
    audio: None = Field(None, description="not honoured: only null")
    prediction: None = Field(None, description="not honoured: only null")
    web_search_options: None = Field(None, description="not honoured: only null")
    moderation: None = Field(None, description="not honoured: only null")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="a hint: sets the variable reasoning_effort of the model's chat template"
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="a hint: sets the variable verbosity of the model's chat template"
    )

    @property
    def max_new_tokens(self) -> int | None:
        """Return the requested limit on output tokens; None without one."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def asked_tokens(self) -> dict[str, int]:
        """The limits on output tokens that the client set, by field."""
        mine = {} if self.max_completion_tokens is None else {"max_completion_tokens": self.max_completion_tokens}
        return mine | super().asked_tokens

    @property
    def offered_tools(self) -> list[ToolBody]:
        return [] if self.tool_choice == "none" else self.tools

    @property
    def required_tools(self) -> list[ToolBody]:
        """Return the tools of which the model must call one; empty if the model decides."""
        if self.tool_choice == "required":
            return self.tools
        if isinstance(self.tool_choice, NamedToolBody):
            return [tool for tool in self.tools if tool.function.name == self.tool_choice.function.name]
        return []

    @property
    def template_variables(self) -> dict[str, JsonValue]:
        """Return the template's variables beside the messages; explicit ones override the protocol's hints."""
        hints: dict[str, JsonValue] = {"reasoning_effort": self.reasoning_effort, "verbosity": self.verbosity}
        return {name: value for name, value in hints.items() if value is not None} | self.chat_template_kwargs

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        yield from super().broken_rules()
        both = self.max_tokens, self.max_completion_tokens
        if None not in both and both[0] != both[1]:
            words = f"must agree, got {both[0]} and {both[1]}; send max_completion_tokens only"
            yield "max_tokens", f"and max_completion_tokens {words}"
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs", f"needs logprobs=true, got {self.top_logprobs} without it; set logprobs"
        if self.continue_final_message and self.add_generation_prompt:
            yield "add_generation_prompt", "must be false with continue_final_message=true, got true; leave it out"
        yield from template_arguments_in(self.chat_template_kwargs)
        yield from unknown_tools(self.tools, self.tool_choice)


def template_arguments_in(variables: Mapping[str, JsonValue]) -> Iterator[tuple[str, str]]:
    """Yield the broken rule if variables of a template contain arguments of the rendering."""
    taken = sorted(TEMPLATE_ARGUMENTS & variables.keys())
    if taken:
        yield "chat_template_kwargs", f"must hold the template's own variables, got {taken}; remove them"
