"""Concurrent prompts with a common prefix: the first is computed or received, the others wait and hit it.

KV is hit only after its result has confirmed it. A first prompt that fails, is aborted or is retracted therefore leaves
nothing to undo: the others stop waiting, and the next one is computed in its place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from engine.core.memory import KVMemory
from engine.core.scheduler.request import DISPATCHED, RECEIVING, Request

# A wait lasts as long as the microbatches in flight. Recomputing fewer tokens than this takes about as long. Of eight
# equal prompts of 100 tokens 128 are computed, with 256 here all 800, and first tokens come in half the time.
LEAST_SPARED_TOKENS: Final = 64


def is_worth_waiting(request: Request, others: Iterable[Request], memory: KVMemory) -> bool:
    """Return whether one of ``others``, whose whole prompts are on their way, spares a request most of its work.

    A prompt is on its way if all of it is launched or being received from another engine.
    """
    most = request.hit_limit_tokens
    if most < LEAST_SPARED_TOKENS:
        return False
    begins = request.ids[:LEAST_SPARED_TOKENS]
    shared = 0
    for other in others:
        is_coming = other.place is DISPATCHED or other.place is RECEIVING
        if is_coming and other.kv_key == request.kv_key and other.ids[:LEAST_SPARED_TOKENS] == begins:
            shared = max(shared, _alike(request.ids, other.ids, min(most, len(other.ids))))
    if not shared:
        return False
    hit = memory.cached_tokens(request.ids, most, request.kv_key)
    spared = memory.cacheable_tokens(shared) - hit
    return spared >= LEAST_SPARED_TOKENS and 2 * spared >= len(request.ids) - hit


def _alike(ids: Sequence[int], others: Sequence[int], most: int) -> int:
    """Return how many of the first ``most`` tokens both prompts share."""
    if ids[:most] == others[:most]:
        return most
    return next(place for place in range(most) if ids[place] != others[place])
