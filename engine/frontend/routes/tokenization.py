"""Routes from text to token ids and back. They ask the tokenizer alone and need no running loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from fastapi import APIRouter, Request, Response

from engine.frontend.admission import Admission
from engine.frontend.context import FrontEnd
from engine.frontend.description import Description
from engine.frontend.openai.tokens import (
    DetokenizeAnswer,
    DetokenizeBody,
    TokenizeAnswer,
    TokenizeBody,
    detokenized,
    tokenized,
)
from engine.frontend.orders import LONG_BODY_BYTES
from engine.frontend.responses import json_answer

__all__ = ["add_tokenization"]

TOKENS = "tokens"
Answer = TypeVar("Answer", TokenizeAnswer, DetokenizeAnswer)


def add_tokenization(router: APIRouter, front: FrontEnd, description: Description) -> None:
    """Add the routes of the tokenizer."""
    admission = front.orders.admission

    async def worked_on(work: Callable[[bytes, Admission], Answer], request: Request) -> Answer:
        """The answer to a body. A long one is worked on in a thread, so that streams do not stutter."""
        async with front.bodies.body_of(request) as data:
            if len(data) <= LONG_BODY_BYTES:
                return work(data, admission)
            return await asyncio.to_thread(work, data, admission)

    @router.post("/tokenize", **description.route(body=TokenizeBody, answer=TokenizeAnswer, errors=(404,), tag=TOKENS))
    async def tokenize(request: Request) -> Response:
        """Say which token ids a text or a conversation becomes."""
        return json_answer(await worked_on(tokenized, request))

    @router.post(
        "/detokenize", **description.route(body=DetokenizeBody, answer=DetokenizeAnswer, errors=(404,), tag=TOKENS)
    )
    async def detokenize(request: Request) -> Response:
        """Say which text token ids are."""
        return json_answer(await worked_on(detokenized, request))
