"""Routes that generate: the native one and those of the OpenAI protocol.

The first and the last place of a request's life. Statuses and streams belong to the responses, shapes to the protocols.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

import msgspec
from fastapi import APIRouter, Request, Response
from msgspec import UNSET

from engine.frontend.context import FrontEnd
from engine.frontend.description import Description
from engine.frontend.dialect import Parsing
from engine.frontend.errors import ApiError
from engine.frontend.openai.answers import ChatAnswer, ChatChunk, CompletionAnswer, ModelCard, ModelList
from engine.frontend.openai.bodies import ChatBody, CompletionBody
from engine.frontend.openai.requests import require_model
from engine.frontend.openai.shapes import ChatShape, CompletionShape
from engine.frontend.openai.spoken import SpokenChoice
from engine.frontend.orders import CHAT, COMPLETION, NATIVE
from engine.frontend.protocol import GenerateAnswer, GenerateBody
from engine.frontend.reasoning import END
from engine.frontend.responses import json_answer, respond

__all__ = ["add_generation", "add_models"]

OPENAI = "openai"
ERRORS = (404, 409, 429, 500, 504)


class NativeShape:
    """Answers of ``/generate``: pieces as they are."""

    def whole(self, answers: Sequence[GenerateAnswer]) -> msgspec.Struct:
        (answer,) = answers
        return answer

    def events(self, index: int, piece: GenerateAnswer) -> Iterable[msgspec.Struct]:  # noqa: ARG002 - there is one
        return (piece,)

    def last_events(self) -> Iterable[msgspec.Struct]:
        return ()


def add_generation(router: APIRouter, front: FrontEnd, description: Description) -> None:
    """Add the routes that generate."""

    @router.post(
        "/generate",
        **description.route(
            body=GenerateBody, answer=GenerateAnswer, event=GenerateAnswer, errors=(409, 429, 500, 504), tag=NATIVE
        ),
    )
    async def generate(request: Request) -> Response:
        """Generate from a text or token ids."""
        order = await front.take_order(NATIVE, request)
        return await respond(request, front, order, NativeShape())

    @router.post(
        "/v1/completions",
        **description.route(
            body=CompletionBody, answer=CompletionAnswer, event=CompletionAnswer, errors=ERRORS, tag=OPENAI
        ),
    )
    async def completions(request: Request) -> Response:
        """Complete one or more prompts."""
        order = await front.take_order(COMPLETION, request)
        shape = CompletionShape(
            order.rid,
            order.lora or front.model_name,
            front.tokenizer,
            n=order.n,
            logprobs=order.logprobs,
            include_usage=order.include_usage,
            echo=order.echo,
            top_logprobs=order.top_logprobs,
            prompt_logprobs=order.prompt_logprobs,
        )
        return await respond(request, front, order, shape)

    @router.post(
        "/v1/chat/completions",
        **description.route(body=ChatBody, answer=ChatAnswer, event=ChatChunk, errors=ERRORS, tag=OPENAI),
    )
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation."""
        order = await front.take_order(CHAT, request)
        shape = ChatShape(
            order.rid,
            order.lora or front.model_name,
            front.tokenizer,
            n=order.n,
            logprobs=order.logprobs,
            include_usage=order.include_usage,
            prompt_logprobs=order.prompt_logprobs,
            new_choice=None if order.parsing is None else functools.partial(_spoken_choice, front, order.parsing),
        )
        decoder = front.decoder_of(order.parsing)
        return await respond(request, front, order, shape, decoder=decoder)

    @router.post("/v1/embeddings", **description.route(errors=(400,), tag=OPENAI))
    async def embeddings() -> Response:
        """Refuse: the model is there to generate, and its hidden states are no embeddings that it was trained for."""
        raise ApiError.invalid(
            f"embeddings need a model that was trained for them, and {front.model_name!r} is one that generates text; "
            "serve an embedding model with another engine, or use /v1/completions here",
            param="model",
        )


def _spoken_choice(front: FrontEnd, parsing: Parsing) -> SpokenChoice:
    end_of_reasoning = None if parsing.reasoning is None else front.tokenizer.token_to_id(END)
    parser, new_id = front.dialect.parser(parsing), front.dialect.new_call_id
    count = front.metrics.count_call
    return SpokenChoice(parser, new_id, count, named=parsing.named, end_of_reasoning=end_of_reasoning)


def add_models(router: APIRouter, front: FrontEnd, description: Description) -> None:
    """Add the routes that say which model is served."""

    def card(lora: str | None = None) -> ModelCard:
        return ModelCard(
            id=lora or front.model_name,
            created=front.created_s,
            max_model_len=front.limits.context_length,
            parent=UNSET if lora is None else front.model_name,
        )

    @router.get("/v1/models", **description.route(answer=ModelList, tag=OPENAI))
    async def models() -> Response:
        """List the served model and its LoRAs."""
        return json_answer(ModelList(data=[card(), *map(card, front.loras)]))

    @router.get("/v1/models/{model:path}", **description.route(answer=ModelCard, errors=(404,), tag=OPENAI))
    async def model_card(model: str) -> Response:
        """Describe the served model, or one of its LoRAs."""
        if model in front.loras:
            return json_answer(card(model))
        require_model(model, front.model_name)
        return json_answer(card())
