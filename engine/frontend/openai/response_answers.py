"""What clients of ``/v1/responses`` get: the response, its items, and the events of its stream.

Shapes only, with the protocol's names. A field that is unset is left out; one that is None is null.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from engine.frontend.errors import ErrorBody
from engine.frontend.openai.answers import ChatLogprob

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
    """Reasoning as the model wrote it; there is no summary."""

    id: str
    status: ItemStatus
    summary: tuple[()] = ()
    content: list[ReasoningContent]


class OutputCall(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag="function_call"):
    """``arguments`` is what the model wrote: JSON, unless the answer was cut or the model erred."""

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
    """Output tokens that are reasoning, its markers among them; 0 where they cannot be told."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, frozen=True, kw_only=True):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(msgspec.Struct, frozen=True, kw_only=True):
    """Why a response ended early: ``max_output_tokens``, or the engine's word for it."""

    reason: str


class ResponseAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A response. ``created_at`` is in seconds since the epoch. The fields from ``background`` on are the request's."""

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
    """``output_index`` is the item's place in the response."""

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
    """The last event of a stream that broke."""

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
    *(ResponseCreated, ResponseInProgress, ItemAdded, PartAdded, ReasoningDelta, ReasoningDone, TextDelta, TextDone),
    *(PartDone, ArgumentsDelta, ArgumentsDone, ItemDone, ResponseCompleted, ResponseIncomplete, ResponseError),
)
