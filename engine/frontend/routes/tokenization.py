"""Routes from text to token ids and back. They ask the tokenizer alone and need no running loop."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from engine.frontend.context import FrontEnd
from engine.frontend.description import Description
from engine.frontend.openai.tokens import DetokenizeAnswer, DetokenizeBody, TokenizeAnswer, TokenizeBody
from engine.frontend.responses import JSON_TYPE
from engine.frontend.token_answers import DETOKENIZE, TOKENIZE

__all__ = ["add_tokenization"]

TOKENS = "tokens"


def add_tokenization(router: APIRouter, front: FrontEnd, description: Description) -> None:
    """Add the routes of the tokenizer."""

    @router.post("/tokenize", **description.route(body=TokenizeBody, answer=TokenizeAnswer, errors=(404,), tag=TOKENS))
    async def tokenize(request: Request) -> Response:
        """Say which token ids a text or a conversation becomes."""
        return Response(await front.token_answers.answer(TOKENIZE, request, front.bodies), media_type=JSON_TYPE)

    @router.post(
        "/detokenize", **description.route(body=DetokenizeBody, answer=DetokenizeAnswer, errors=(404,), tag=TOKENS)
    )
    async def detokenize(request: Request) -> Response:
        """Say which text token ids are."""
        return Response(await front.token_answers.answer(DETOKENIZE, request, front.bodies), media_type=JSON_TYPE)
