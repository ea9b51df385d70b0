"""Routes that generate: the native one and those of the OpenAI protocol.

The first and the last place of a request's life. Statuses and streams are the exchange's, shapes the protocols'.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from engine.frontend.admission import admit
from engine.frontend.context import FrontEnd
from engine.frontend.description import Description
from engine.frontend.openai.answers import ChatAnswer, ChatChunk, CompletionAnswer, ModelCard, ModelList
from engine.frontend.openai.bodies import ChatBody, CompletionBody
from engine.frontend.openai.requests import answer_id, chat_requests, completion_requests, require_model
from engine.frontend.openai.shapes import ChatShape, CompletionShape
from engine.frontend.protocol import GenerateAnswer, GenerateBody, parse_body
from engine.frontend.responses import json_answer, read_body, respond

__all__ = ["add_generation", "add_models"]

NATIVE = "native"
OPENAI = "openai"
ERRORS = (404, 409, 429, 500)


class NativeShape:
    """Answers of ``/generate``: pieces as they are."""

    def whole(self, answers: Sequence[GenerateAnswer]) -> msgspec.Struct:
        """The only answer."""
        (answer,) = answers
        return answer

    def events(self, index: int, piece: GenerateAnswer) -> Iterable[msgspec.Struct]:  # noqa: ARG002 - there is one
        """The piece."""
        return (piece,)

    def last_events(self) -> Iterable[msgspec.Struct]:
        """Nothing."""
        return ()


def add_generation(router: APIRouter, front: FrontEnd, description: Description) -> None:
    """Add the routes that generate."""
    limit_bytes = front.settings.max_body_bytes

    @router.post(
        "/generate",
        **description.route(
            body=GenerateBody, answer=GenerateAnswer, event=GenerateAnswer, errors=(409, 429, 500), tag=NATIVE
        ),
    )
    async def generate(request: Request) -> Response:
        """Generate from a text or token ids."""
        body = parse_body(GenerateBody, await read_body(request, limit_bytes))
        message = await admit(body, front.tokenizer, front.limits)
        return await respond(request, front, [message], NativeShape(), stream=body.stream)

    @router.post(
        "/v1/completions",
        **description.route(
            body=CompletionBody, answer=CompletionAnswer, event=CompletionAnswer, errors=ERRORS, tag=OPENAI
        ),
    )
    async def completions(request: Request) -> Response:
        """Complete one or more prompts."""
        body = parse_body(CompletionBody, await read_body(request, limit_bytes))
        rid = answer_id(body, "cmpl")
        messages = await completion_requests(body, rid, front)
        shape = CompletionShape(
            rid,
            front.model_name,
            front.tokenizer,
            n=body.n,
            logprobs=body.logprobs is not None,
            include_usage=body.include_usage,
        )
        return await respond(request, front, messages, shape, stream=body.stream)

    @router.post(
        "/v1/chat/completions",
        **description.route(body=ChatBody, answer=ChatAnswer, event=ChatChunk, errors=ERRORS, tag=OPENAI),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        body = parse_body(ChatBody, await read_body(request, limit_bytes))
        rid = answer_id(body, "chatcmpl")
        messages = await chat_requests(body, rid, front)
        shape = ChatShape(
            rid,
            front.model_name,
            front.tokenizer,
            n=body.n,
            logprobs=body.logprobs,
            include_usage=body.include_usage,
        )
        return await respond(request, front, messages, shape, stream=body.stream)


def add_models(router: APIRouter, front: FrontEnd, description: Description) -> None:
    """Add the routes that say which model is served."""

    def card() -> ModelCard:
        return ModelCard(id=front.model_name, created=front.created_s, max_model_len=front.limits.context_length)

    @router.get("/v1/models", **description.route(answer=ModelList, tag=OPENAI))
    async def models() -> Response:
        """List the served model."""
        return json_answer(ModelList(data=[card()]))

    @router.get("/v1/models/{model:path}", **description.route(answer=ModelCard, errors=(404,), tag=OPENAI))
    async def model_card(model: str) -> Response:
        """Describe the served model."""
        require_model(model, front)
        return json_answer(card())
