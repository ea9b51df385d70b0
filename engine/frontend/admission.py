"""From a checked body to a request: tokenizes the prompt and refuses what the model can never serve.

Asks the same rule as the scheduler for what never fits, so that both refuse alike and nothing is queued in vain.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.frontend.errors import ApiError
from engine.frontend.protocol import GenerateBody
from engine.limits import Limits
from engine.messages import Generate

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["admit", "check_fits", "check_vocabulary", "request_of", "tokenize"]

# A longer text takes tens of milliseconds to tokenize and goes to a thread, so that streams do not stutter.
LONG_TEXT_CHARS = 16_384


async def admit(body: GenerateBody, tokenizer: Tokenizer, limits: Limits) -> Generate:
    """The request that a body stands for. Raises ApiError (400) with the numbers when it can never run here."""
    prompt_ids = await tokenize(tokenizer, body.text) if body.text is not None else tuple(body.input_ids or ())
    return request_of(body, prompt_ids, limits)


def request_of(body: GenerateBody, prompt_ids: tuple[int, ...], limits: Limits) -> Generate:
    """The request of a body whose prompt is tokenized. Raises ApiError (400) as ``admit`` does."""
    check_vocabulary(prompt_ids, limits.vocab_size, "input_ids")
    check_vocabulary(body.sampling_params.stop_token_ids, limits.vocab_size, "sampling_params.stop_token_ids")
    param = "text" if body.text is not None else "input_ids"
    check_fits(len(prompt_ids), body.sampling_params.max_new_tokens, limits, param)
    return Generate(
        rid=body.rid or uuid.uuid4().hex,
        prompt_ids=prompt_ids,
        sampling=body.sampling_params.params(),
        priority=body.priority,
        return_logprob=body.return_logprob,
        top_logprobs_num=body.top_logprobs_num,
    )


async def tokenize(tokenizer: Tokenizer, text: str, *, special: bool = True) -> tuple[int, ...]:
    """The token ids of a text, with the special tokens that the tokenizer puts around one if ``special``."""
    try:
        if len(text) <= LONG_TEXT_CHARS:
            return tuple(tokenizer.encode(text, add_special_tokens=special).ids)
        encoding = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=special)
    except UnicodeEncodeError as exc:  # JSON can spell half of a surrogate pair, which is no text.
        raise ApiError.invalid(f"the prompt must be Unicode text, but: {exc}; escape characters as pairs") from exc
    return tuple(encoding.ids)


def check_fits(prompt_tokens: int, max_new_tokens: int, limits: Limits, param: str) -> None:
    """Raise ApiError (400) with the numbers when a request can never run here."""
    reason = limits.why_never_fits(prompt_tokens, max_new_tokens)
    if reason is not None:
        raise ApiError.invalid(reason, param=param)


def check_vocabulary(ids: Sequence[int], vocab_size: int, param: str) -> None:
    """Raise ApiError (400) for the first id that is no token of the model."""
    outside = next((token_id for token_id in ids if not 0 <= token_id < vocab_size), None)
    if outside is not None:
        raise ApiError.invalid(
            f"{param} must be token ids from 0 to {vocab_size - 1}, got {outside}; use the model's own tokenizer",
            param=param,
        )
