"""Replies to a request's client after a step, and answers to administrative calls. Changes nothing."""

from __future__ import annotations

import msgspec

from engine.core.messages import STOP, Call, CallAnswer, PromptLogprob, TokenLogprob, TokenOutput
from engine.core.scheduler.request import Request


def output_of(request: Request, *, token: int | None, logprob: TokenLogprob | None) -> TokenOutput:
    """Return the reply with a request's newest token, its end, or both."""
    return TokenOutput(
        rid=request.rid,
        token_ids=() if token is None else (token,),
        logprobs=() if logprob is None else (logprob,),
        finish_reason=request.finish_reason,
        stop_token_id=token if request.finish_reason is STOP else None,
        error=request.error,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        cached_tokens_host=request.cached_tokens_host,
        completion_tokens=len(request.ids) - request.prompt_tokens,
    )


def part_of(request: Request, values: tuple[PromptLogprob, ...]) -> TokenOutput:
    """Return the reply with the logprobs of a chunk of a request's prompt."""
    output = output_of(request, token=None, logprob=None)
    return msgspec.structs.replace(output, prompt_logprobs=values)


def done(call: Call, message: str) -> CallAnswer:
    return CallAnswer(call_id=call.call_id, ok=True, message=message)


def refused(call: Call, why: str, *, not_found: bool = False, fault: str | None = None) -> CallAnswer:
    message = f"{call.words} refused: {why}"
    return CallAnswer(call_id=call.call_id, ok=False, message=message, not_found=not_found, fault=fault)
