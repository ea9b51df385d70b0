"""Drafts of the executable specification: the guesses, the room for them, and how many are accepted.

Names in bold are the rules of docs/rules.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Protocol

from engine.core.limits import Limits
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.request import SpecifiedRequest as Request

DOUBTED_MISSES: Final = 2
MISSES_LIMIT: Final = 6
REST_TOKENS: Final = 64
LONGEST_REST_TOKENS: Final = 1024


class _Specified(Protocol):
    limits: Limits
    memory: SpecifiedMemory
    running: list[Request]
    totals: dict[str, int]


def drafts_of(request: Request, engine: _Specified) -> tuple[int, ...]:
    """**Drafts**: as many guesses as the free pages and the rest of the output have room for."""
    limits, ids = engine.limits, request.ids
    if len(ids) < request.guesses_from:
        return ()
    room = engine.memory.free_tokens(request, spare_pages=len(engine.running)) - len(ids)
    most = min(limits.draft_tokens, request.limit_tokens - len(ids) - 1, room)
    if most <= 0 or limits.has_draft_model:
        return request.guesses[: max(0, most)]
    fewest = limits.ngram_min if request.guesses_hold else min(2 * limits.ngram_min, limits.ngram_max)
    for count in range(limits.ngram_max, fewest - 1, -1):
        for place in range(len(ids) - count - 1, -1, -1):
            if ids[place : place + count] == ids[-count:]:
                text = [*ids]
                for number in range(most):
                    text.append(text[place + count + number])
                return tuple(text[len(ids) :])
    return ()


def verify(request: Request, engine: _Specified, accepted: Iterator[int], guesses: Iterator[tuple[int, ...]]) -> int:
    """**Verify**: keep the accepted drafts; rejected ones count as not computed. Returns the number of tokens."""
    drafts, request.drafts, request.guesses = request.drafts, (), next(guesses, ())
    right = next(accepted) if drafts else 0
    engine.totals["drafted_tokens"] += len(drafts)
    engine.totals["accepted_tokens"] += right
    request.planned_tokens -= len(drafts) - right
    if drafts:
        engine.memory.trim(request)
        request.misses = 0 if right else request.misses + 1
        request.guesses_hold = right > 0 or (request.guesses_hold and request.misses < DOUBTED_MISSES)
        if request.misses >= MISSES_LIMIT:
            rest = REST_TOKENS * 2 ** (request.misses - MISSES_LIMIT)
            request.guesses_from = len(request.ids) + min(LONGEST_REST_TOKENS, rest)
    return right + 1
