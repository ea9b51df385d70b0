"""The order in which waiting requests are offered memory: first come first served, longest prefix match, or priority.

A policy orders; it never admits. Ties are always broken by arrival, so that every order is total and deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from engine.memory import KVMemory
from engine.scheduler.request import Request

__all__ = ["LPM_QUEUE_LIMIT_REQUESTS", "OVERTAKEN_LIMIT_REQUESTS", "Policy", "policy_named"]

# Matching every waiting prompt against the tree costs a walk each; in a longer queue than this it is first come first
# served.
LPM_QUEUE_LIMIT_REQUESTS: Final = 128
# So many later requests may start before one whose prompt matches less; then it goes by its arrival.
OVERTAKEN_LIMIT_REQUESTS: Final = 16

Policy = Callable[[Sequence[Request], KVMemory], Sequence[Request]]


def policy_named(name: str) -> Policy:
    """The policy of this name. Raises KeyError for a name that the configuration should have refused."""
    return {"fcfs": _first_come, "lpm": _longest_prefix, "priority": _highest_priority}[name]


def _first_come(waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:  # noqa: ARG001
    return waiting


def _longest_prefix(waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
    if len(waiting) > LPM_QUEUE_LIMIT_REQUESTS:
        return waiting
    return sorted(waiting, key=lambda request: (-_match_that_counts(request, memory), request.arrival))


def _match_that_counts(request: Request, memory: KVMemory) -> float:
    """Cached tokens; more than anybody can have for a request that was overtaken too often, or it could starve."""
    return math.inf if request.overtaken >= OVERTAKEN_LIMIT_REQUESTS else memory.cached_tokens(request.ids)


def _highest_priority(waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:  # noqa: ARG001
    return sorted(waiting, key=lambda request: (-request.priority, request.arrival))
