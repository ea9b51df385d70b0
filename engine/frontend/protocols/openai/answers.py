"""Bodies of replies and events of streams in the OpenAI protocol, with its field names.

Only types. An unset field is left out; a field that is None becomes null.
"""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from engine.frontend.schema.native import CachedTokensDetails


class PromptDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Prompt tokens whose KV came from the prefix cache."""

    cached_tokens: int


class CompletionDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Output tokens of reasoning, markers included."""

    reasoning_tokens: int


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Token counts of all choices together; each prompt counts once."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET


class Extension(msgspec.Struct, frozen=True, kw_only=True):
    """The part of a reply that SGLang adds to the protocol, as ``sglext`` (SGLang pull request 17648)."""

    cached_tokens_details: CachedTokensDetails


class CompletionLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a completion's tokens. Offsets are characters of this choice's text.

    With ``echo`` the prompt's logprobs come first; its first token has none.
    """

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptTokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """The logprob of a token at one position of a prompt, and its rank among all tokens there, from 1."""

    logprob: float
    rank: int
    decoded_token: str


class CompletionChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One choice of a completion; in a stream, its delta."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | UnsetType = UNSET
    token_ids: tuple[int, ...] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class CompletionAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A completion, or one event of its stream. ``created`` is in seconds since the epoch."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    sglext: Extension | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One of the most likely tokens. ``bytes`` are its UTF-8 bytes, possibly part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of the output, and the most likely tokens at its position."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(msgspec.Struct, frozen=True, kw_only=True):
    """The called function. ``arguments`` is JSON unless the output was truncated, see ``finish_reason``."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledFunctionDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The delta of a call: its name once, its arguments in pieces."""

    name: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET


class ToolCallDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The new part of the call with this index, counted in its choice. Id and type come once, with the name."""

    index: int
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunctionDelta


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's message. ``content`` is null if the message has only reasoning or calls."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A chat completion. ``created`` is in seconds since the epoch."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    sglext: Extension | UnsetType = UNSET
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    sglext: Extension | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ModelCard(msgspec.Struct, frozen=True, kw_only=True):
    """The served model, or a LoRA whose ``parent`` it is. ``max_model_len`` is its context in tokens."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "lockstep"
    max_model_len: int
    parent: str | UnsetType = UNSET


class ModelList(msgspec.Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]
