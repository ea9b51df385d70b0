"""Routes from text to token ids and back, in the formats of other engines. They need no running scheduler loop.

A text or a conversation gives the same ids as in a prompt. A short body is processed at once, a long one in a separate
process, which also builds the reply.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Annotated

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import Field

from engine.frontend.http.body_reader import BodyReader, unless_gone
from engine.frontend.http.description import Description
from engine.frontend.http.forked_work import BodyWork, LongBodies, is_long
from engine.frontend.http.responses import JSON_TYPE
from engine.frontend.protocols.anthropic import CountTokensBody, MessagesError, TokenCount, token_count
from engine.frontend.protocols.openai.bodies import (
    MAX_MESSAGES,
    MAX_TOOLS,
    ChatMessageBody,
    ToolBody,
    template_arguments_in,
)
from engine.frontend.protocols.openai.requests import requested_lora
from engine.frontend.schema.native import FreeJson, NullableBody, OnlyFalse, RuledBody, TokenIds, parse_body
from engine.frontend.sessions.requests import ServedModel, check_vocabulary, tokenize

TOKENIZE = "tokenize"
DETOKENIZE = "detokenize"
COUNT = "count_tokens"
TOKENS = "tokens"


class TokenizeBody(RuledBody, NullableBody):
    """The body of ``POST /tokenize``: exactly one of ``prompt``, a text, and ``messages``, a conversation."""

    model: str | None = Field(None, description="the served model's name; left out: the served model")
    prompt: str | None = None
    messages: list[ChatMessageBody] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    tools: Annotated[list[ToolBody], Field(fail_fast=True)] = Field(
        default=[], max_length=MAX_TOOLS, description="only for messages: functions that the model may call"
    )
    add_special_tokens: bool | None = Field(
        None, description="add the tokenizer's special tokens; left out: as in generation, only around a prompt"
    )
    add_generation_prompt: bool = Field(default=True, description="only for messages: end where the reply begins")
    continue_final_message: OnlyFalse = Field(default=False, description="not honoured: only false")
    chat_template_kwargs: dict[str, FreeJson] = Field(default={}, description="variables of the chat template")
    return_token_strs: bool = Field(default=False, description="also return the vocabulary's spelling of each token")

    def broken_rules(self) -> Iterator[tuple[str, str]]:
        if (self.prompt is None) == (self.messages is None):
            given = "neither" if self.prompt is None else "both"
            yield "", f"exactly one of prompt and messages must be given, got {given}; send one of them"
        if self.tools and self.messages is None:
            yield "tools", f"need messages, got {len(self.tools)} tools with a prompt; leave them out"
        yield from template_arguments_in(self.chat_template_kwargs)


class TokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/tokenize``. ``max_model_len`` is the context in tokens."""

    count: int
    max_model_len: int
    tokens: tuple[int, ...]
    token_strs: list[str | None] | None = None


class DetokenizeBody(NullableBody):
    """The body of ``POST /detokenize``."""

    model: str | None = Field(None, description="the served model's name; left out: the served model")
    tokens: TokenIds


class DetokenizeAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/detokenize``: the text, special tokens included."""

    prompt: str


def token_works(served: ServedModel) -> dict[str, BodyWork]:
    """Map each kind of work to the function that turns a body into a JSON reply."""
    return {
        TOKENIZE: functools.partial(_json_of, answer=_tokenized, served=served),
        DETOKENIZE: functools.partial(_json_of, answer=_detokenized, served=served),
        COUNT: functools.partial(_json_of, answer=token_count, served=served),
    }


def add_tokenization(
    router: APIRouter, served: ServedModel, bodies: BodyReader, long_bodies: LongBodies, description: Description
) -> None:
    """Add the routes of the tokenizer. ``long_bodies`` must know ``token_works``."""
    works = token_works(served)

    async def answer(kind: str, request: Request) -> Response:
        async with bodies.body_of(request) as data:
            is_short = not is_long(data, is_chat=kind != DETOKENIZE)
            said = works[kind](data) if is_short else await unless_gone(request, long_bodies.work_on(kind, data))
        return Response(said, media_type=JSON_TYPE)

    @router.post("/tokenize", **description.route(body=TokenizeBody, answer=TokenizeAnswer, errors=(404,), tag=TOKENS))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a text or a conversation."""
        return await answer(TOKENIZE, request)

    @router.post(
        "/detokenize", **description.route(body=DetokenizeBody, answer=DetokenizeAnswer, errors=(404,), tag=TOKENS)
    )
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        return await answer(DETOKENIZE, request)

    counted = description.route(
        body=CountTokensBody, answer=TokenCount, errors=(404,), failure=MessagesError, tag=TOKENS
    )

    @router.post("/v1/messages/count_tokens", **counted)
    async def count_tokens(request: Request) -> Response:
        """Return the number of tokens in the prompt of a message, in the Anthropic protocol."""
        return await answer(COUNT, request)


def _json_of(data: bytes, answer: Callable[[bytes, ServedModel], msgspec.Struct], served: ServedModel) -> bytes:
    return msgspec.json.encode(answer(data, served))


def _tokenized(data: bytes, served: ServedModel) -> TokenizeAnswer:
    """Return the ids of a text or a conversation. Raises ApiError, also if the model has no chat template."""
    body = parse_body(TokenizeBody, data)
    requested_lora(body.model, served)
    text, param = body.prompt, "prompt"
    if text is None:
        conversation = [message.for_template for message in body.messages or ()]
        tools = [tool.for_template for tool in body.tools]
        text = served.template.render(
            conversation, body.chat_template_kwargs, ask=body.add_generation_prompt, tools=tools
        )
        param = "messages"
    special = body.prompt is not None if body.add_special_tokens is None else body.add_special_tokens
    ids = tokenize(served, text, param=param, special=special)
    strings = [served.tokenizer.id_to_token(token_id) for token_id in ids] if body.return_token_strs else None
    longest = served.limits.context_length
    return TokenizeAnswer(count=len(ids), max_model_len=longest, tokens=ids, token_strs=strings)


def _detokenized(data: bytes, served: ServedModel) -> DetokenizeAnswer:
    """Return the text of ids. Raises ApiError (400) for the first id that is not a token of the model."""
    body = parse_body(DetokenizeBody, data)
    requested_lora(body.model, served)
    check_vocabulary(body.tokens, served.limits.vocab_size, "tokens")
    return DetokenizeAnswer(prompt=served.tokenizer.decode(body.tokens, skip_special_tokens=False))
