"""Replies to a request's client after a step, and answers to administrative calls. Changes nothing."""

from __future__ import annotations

from typing import Final

import msgspec

from engine.core.messages import (
    STOP,
    CallAnswer,
    FlushCache,
    LoadLora,
    PromptLogprob,
    Sleep,
    StartProfile,
    StopProfile,
    TokenLogprob,
    TokenOutput,
    UnloadLora,
    UpdateWeights,
    Wake,
)
from engine.core.scheduler.request import Request

ControlCall = FlushCache | UpdateWeights | StartProfile | StopProfile | LoadLora | UnloadLora | Sleep | Wake

CALL_NAMES: Final[dict[type, str]] = {
    FlushCache: "flush",
    UpdateWeights: "weight update",
    StartProfile: "profile",
    StopProfile: "profile",
    LoadLora: "LoRA load",
    UnloadLora: "LoRA unload",
    Sleep: "sleep",
    Wake: "wake",
}


def output_of(request: Request, *, token: int | None, logprob: TokenLogprob | None) -> TokenOutput:
    """The reply with a request's newest token, with its end, or with both."""
    return TokenOutput(
        rid=request.rid,
        token_ids=() if token is None else (token,),
        logprobs=() if logprob is None else (logprob,),
        finish_reason=request.finish_reason,
        stop_token_id=token if request.finish_reason is STOP else None,
        error=request.error,
        prompt_tokens=request.prompt_tokens,
        cached_tokens=request.cached_tokens,
        completion_tokens=len(request.ids) - request.prompt_tokens,
    )


def part_of(request: Request, values: tuple[PromptLogprob, ...]) -> TokenOutput:
    """The reply with the logprobs of a part of a request's prompt."""
    output = output_of(request, token=None, logprob=None)
    return msgspec.structs.replace(output, prompt_logprobs=values)


def done(call: ControlCall, message: str) -> CallAnswer:
    return CallAnswer(call_id=call.call_id, ok=True, message=message)


def refused(call: ControlCall, why: str, *, not_found: bool = False, fault: str | None = None) -> CallAnswer:
    message = f"{CALL_NAMES[type(call)]} refused: {why}"
    return CallAnswer(call_id=call.call_id, ok=False, message=message, not_found=not_found, fault=fault)
