"""``POST /prefill``: a decode engine's request to a prefill engine, and the reply after all KV is sent.

Owns the rules of the body. The scheduler and the stages own the transfer.
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Annotated, Final

import msgspec
from pydantic import Field

from engine.core.config import MAX_STAGES
from engine.core.errors import ConfigError
from engine.core.limits import Limits
from engine.core.messages import Delivery, FinishReason, Generate, SamplingParams
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.frontend.schema.native import (
    MAX_INT32,
    MAX_PATH_CHARS,
    MAX_RID_CHARS,
    MAX_SALT_CHARS,
    GenerateAnswer,
    StrictBody,
    TimeLimit,
    TokenIds,
    parse_body,
)
from engine.frontend.sessions.requests import Order, ServedModel, check_fits, check_vocabulary
from engine.frontend.sessions.sessions import Shape, Shaping
from engine.process.kv_addresses import parse_kv_address

PREFILL: Final = "/prefill"
_PREFILLS: Final = (
    "only decode engines generate text, and this engine computes prompts for them (role='prefill'); call a decode "
    "engine, or the router in front of them"
)
MAX_ADDRESS_CHARS: Final = 512


def require_text(limits: Limits) -> None:
    """Raise ApiError on a prefill engine: clients must call a decode engine."""
    if limits.prefills:
        raise ApiError(ErrorType.MISDIRECTED, _PREFILLS)


class PrefillBody(StrictBody):
    """The body of ``POST /prefill``: compute a prompt of full pages, and send its KV from ``first_page`` on."""

    to: list[Annotated[str, Field(min_length=1, max_length=MAX_ADDRESS_CHARS)]] = Field(
        min_length=1,
        max_length=MAX_STAGES,
        description="where each stage of the decode engine receives KV: unix:PATH#RUN or tcp:HOST:PORT#RUN",
    )
    transfer: int = Field(ge=1, le=MAX_INT32, description="the number of the transfer on those stages")
    first_page: int = Field(0, ge=0, le=MAX_INT32)
    weights: str = Field(
        "", max_length=MAX_PATH_CHARS, description="the path of the last weight update; '': the configured weights"
    )
    page_size: int = Field(ge=1, le=MAX_INT32)
    prompt_ids: TokenIds
    priority: int = Field(0, ge=-MAX_INT32, le=MAX_INT32)
    cache_salt: str | None = Field(None, min_length=1, max_length=MAX_SALT_CHARS)
    timeout_s: TimeLimit | None = None
    rid: str | None = Field(
        None, min_length=1, max_length=MAX_RID_CHARS, description="the id of the prompt on this engine"
    )


class PrefillAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/prefill``, in tokens."""

    prompt_tokens: int
    cached_tokens: int


def prefill_order(data: bytes, served: ServedModel) -> Order:
    """Make the order of a body of ``/prefill``. Raises ApiError."""
    body, limits = parse_body(PrefillBody, data), served.limits
    if body.page_size != limits.page_size:
        raise ApiError.at(
            "page_size",
            f"must be {limits.page_size}, the one of this engine, got {body.page_size}; give both engines the same",
        )
    pages, rest = divmod(len(body.prompt_ids), limits.page_size)
    if rest or pages <= body.first_page:
        raise ApiError.at(
            "prompt_ids",
            f"must be full pages of {limits.page_size} tokens, more than first_page={body.first_page} of them, got "
            f"{len(body.prompt_ids)} tokens; send the last part with the prompt at the decode engine",
        )
    check_vocabulary(body.prompt_ids, limits.vocab_size, "prompt_ids")
    check_fits(len(body.prompt_ids), 0, limits, "prompt_ids")
    try:
        for address in body.to:
            parse_kv_address(address)
    except ConfigError as exc:
        raise ApiError.invalid(
            f"to: {exc}; send the addresses that the decode engine's stages announced", param="to"
        ) from exc
    message = Generate(
        rid=body.rid or uuid.uuid4().hex,
        prompt_ids=tuple(body.prompt_ids),
        sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
        priority=body.priority,
        timeout_s=body.timeout_s,
        cache_salt=body.cache_salt,
        deliver=Delivery(tuple(body.to), body.transfer, body.first_page, body.weights),
    )
    return Order(rid=message.rid, messages=(message,), stream=False)


class PrefillShape(Shape):
    """The answer of ``/prefill``, which is never streamed."""

    def whole(self, answers: Sequence[GenerateAnswer]) -> Shaping[PrefillAnswer]:
        """Reply with counts once all KV is sent. Raises ApiError for a prompt that ended early."""
        yield
        (answer,) = answers
        meta = answer.meta_info
        if meta.finish_reason is not FinishReason.LENGTH:
            raise ApiError.unavailable(f"the prompt ended before its KV was sent ({meta.finish_reason}); try again")
        return PrefillAnswer(prompt_tokens=meta.prompt_tokens, cached_tokens=meta.cached_tokens)
