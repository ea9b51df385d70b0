"""The queue of the executable specification: in which order requests are tried and give way, and who was overtaken.

Names in bold are the rules of docs/architecture.md, "The rules of a step". It admits nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.limits import Limits
from scripted.checks.specified_memory import SpecifiedMemory
from scripted.checks.specified_request import SpecifiedRequest

__all__ = ["by_policy", "gives_way", "is_overdue", "overtake"]

OVERTAKEN_LIMIT_REQUESTS: Final = 16
LPM_QUEUE_LIMIT_REQUESTS: Final = 128


def is_overdue(request: SpecifiedRequest) -> bool:
    """**Overtaken**: as often as it may be."""
    return request.overtaken >= OVERTAKEN_LIMIT_REQUESTS


def by_policy(waiting: Sequence[SpecifiedRequest], limits: Limits, memory: SpecifiedMemory) -> list[SpecifiedRequest]:
    """**Order**: by arrival, by priority, or by what is cached; what was overtaken too often comes before the rest."""
    if limits.schedule_policy == "fcfs" or (
        limits.schedule_policy == "lpm" and len(waiting) > LPM_QUEUE_LIMIT_REQUESTS
    ):
        return list(waiting)
    due = [one for one in waiting if is_overdue(one)]
    others = [one for one in waiting if not is_overdue(one)]
    if limits.schedule_policy == "priority":
        return sorted(due, key=_by_priority) + sorted(others, key=_by_priority)
    return due + sorted(others, key=lambda one: -len(memory.match(one.ids[: one.may_hit + 1])))


def overtake(started: SpecifiedRequest, waiting: Sequence[SpecifiedRequest], limits: Limits) -> list[SpecifiedRequest]:
    """**Overtaken**: those that came before and still wait; with priorities, only the one that waits longest."""
    overtaken = [one for one in waiting if one.arrival < started.arrival]
    if limits.schedule_policy == "priority":
        overtaken = [one for one in overtaken if one is waiting[0]]
    started.overtaken = 0
    for one in overtaken:
        one.overtaken += 1
    return overtaken


def gives_way(request: SpecifiedRequest) -> tuple[int, int]:
    """**Victim**: of the lowest priority, the latest to arrive."""
    return -request.priority, request.arrival


def _by_priority(request: SpecifiedRequest) -> int:
    return -request.priority
