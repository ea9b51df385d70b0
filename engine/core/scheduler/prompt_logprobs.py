"""Prompt logprobs: which positions of a prompt a segment asks for, and how their values reach the client.

Each part travels with the result of its chunk and is told in that step, once. A request notes up to where it was told,
so that a prompt that is computed again asks only for the rest. Values are never kept here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.core.errors import IntegrityError
from engine.core.messages import Completion, TokenOutput
from engine.core.plan import DECODE, Microbatch
from engine.core.scheduler.replies import part_of
from engine.core.scheduler.request import NO_LOGPROBS_DUE, Request

# What ``next_asked`` gives for a segment that asks for nothing: ``logprobs_from`` and ``next_id``.
NOTHING: Final = (-1, -1)


def first_due(prompt_logprobs_from: int) -> int:
    """The first position whose logits a request that begins still has to be told of."""
    return NO_LOGPROBS_DUE if prompt_logprobs_from < 0 else prompt_logprobs_from


def next_asked(request: Request, start: int, end: int) -> tuple[int, int]:
    """``logprobs_from`` and ``next_id`` of a segment of a prompt from ``start`` to ``end``.

    The logits of a position are those of the token that follows it. So the last position of a prompt has nothing to
    give, and the last one of any other part needs the first token of the next.
    """
    first = max(start, request.logprobs_due)
    if first >= min(end, request.prompt_tokens - 1):
        return NOTHING
    return first, request.ids[end] if end < request.prompt_tokens else -1


def parts_told(microbatch: Microbatch, requests: Sequence[Request], completion: Completion) -> list[TokenOutput]:
    """A reply for each part of a prompt that came with a result, those of requests that have ended left out.

    Raises IntegrityError for a result that does not fit its plan.
    """
    if microbatch.mode is DECODE:
        return []
    both = zip(microbatch.segments, requests, strict=True)
    asked = [(segment, request) for segment, request in both if segment.logprobs_from >= 0]
    values = completion.prompt_logprobs
    if not asked and not values:
        return []
    counts, due = [len(part) for part in values], [len(segment.targets) for segment, _ in asked]
    if counts != due:
        raise IntegrityError(
            f"microbatch {microbatch.id} came back with prompt logprobs of {counts} tokens, but asked for them of {due}"
        )
    told: list[TokenOutput] = []
    for (segment, request), part in zip(asked, values, strict=True):
        if not request.is_finished:
            request.logprobs_due = segment.logprobs_from + len(part)
            told.append(part_of(request, part))
    return told
