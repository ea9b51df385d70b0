"""From an HTTP request about tokens to the JSON of its answer, where it delays no stream.

A short body is worked on at once, a long one in a process of its own, its answer included. Decides nothing else.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import msgspec
from fastapi import Request

from engine.frontend.body_reader import BodyReader
from engine.frontend.long_bodies import LONG_BODY_BYTES, BodyWork, LongBodies
from engine.frontend.openai.tokens import detokenized, tokenized
from engine.frontend.served_model import ServedModel

__all__ = ["DETOKENIZE", "TOKENIZE", "TokenAnswers", "token_works"]

TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"


def token_works(served: ServedModel) -> dict[str, BodyWork]:
    """The JSON of the answer to a body, by the kind of question."""
    return {
        TOKENIZE: functools.partial(_json_of, answer=tokenized, served=served),
        DETOKENIZE: functools.partial(_json_of, answer=detokenized, served=served),
    }


class TokenAnswers:
    """Answers what is asked of the tokenizer. ``long_bodies`` must know ``token_works``."""

    def __init__(self, served: ServedModel, long_bodies: LongBodies) -> None:
        self._works = token_works(served)
        self._long_bodies = long_bodies

    async def answer(self, kind: str, request: Request, bodies: BodyReader) -> bytes | memoryview:
        """The JSON of the answer to a request of a kind. Raises ApiError."""
        async with bodies.body_of(request) as data:
            if len(data) <= LONG_BODY_BYTES:
                return self._works[kind](data)
            return await self._long_bodies.work_on(kind, data)


def _json_of(data: bytes, answer: Callable[[bytes, ServedModel], msgspec.Struct], served: ServedModel) -> bytes:
    return msgspec.json.encode(answer(data, served))
