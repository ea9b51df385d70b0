"""The queue of the executable specification: the order of tries, the requests that give way, and time limits.

Names in bold are the rules of docs/rules.md. This module admits nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Container, Iterable, Sequence
from typing import Final

from engine.core.limits import Limits
from engine.core.messages import Generate, RefusalKind
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.request import Page, SpecifiedRequest

OVERTAKEN_LIMIT_REQUESTS: Final = 16
LPM_QUEUE_LIMIT_REQUESTS: Final = 128


def why_refused(
    message: Generate,
    failure: str | None,
    live: Container[str],
    waiting: int,
    limits: Limits,
    loras: Container[str],
    weights: str | None,
) -> tuple[RefusalKind, str] | None:
    """**Refuse**: the first reason that applies, or None."""
    never = limits.why_never_fits(len(message.prompt_ids), message.sampling.max_new_tokens)
    if failure is not None:
        return RefusalKind.UNAVAILABLE, failure
    if never is not None:
        return RefusalKind.INVALID, never
    if (deliver := message.deliver) is not None:
        if not limits.prefills or len(deliver.to) != limits.pp_size:
            return RefusalKind.UNAVAILABLE, "pp_size" if limits.prefills else "role='prefill'"
        if deliver.weights != (weights or ""):
            return RefusalKind.UNAVAILABLE, deliver.weights
    if message.lora is not None and message.lora not in loras:
        return RefusalKind.NOT_FOUND, repr(message.lora)
    if message.rid in live:
        return RefusalKind.DUPLICATE, repr(message.rid)
    # All choices of an answer enter the queue, or none; the first one reserves the room of the others.
    if message.first_choice in live or waiting + message.choices <= limits.max_queued_requests:
        return None
    fits = message.choices <= limits.max_queued_requests
    return RefusalKind.BUSY, f"{waiting} requests wait" if fits else f"{message.choices} choices"


def is_overdue(request: SpecifiedRequest) -> bool:
    """**Overtaken**: whether it was overtaken as often as allowed."""
    return request.overtaken >= OVERTAKEN_LIMIT_REQUESTS


def by_policy(waiting: Sequence[SpecifiedRequest], limits: Limits, memory: SpecifiedMemory) -> list[SpecifiedRequest]:
    """**Order**: by arrival, priority or cached prefix; requests that were overtaken too often come first."""
    if limits.schedule_policy == "fcfs" or (
        limits.schedule_policy in ("lpm", "dfs-weight") and len(waiting) > LPM_QUEUE_LIMIT_REQUESTS
    ):
        return list(waiting)
    due = [one for one in waiting if is_overdue(one)]
    others = [one for one in waiting if not is_overdue(one)]
    if limits.schedule_policy == "priority":
        return sorted(due, key=_by_priority) + sorted(others, key=_by_priority)
    if limits.schedule_policy == "dfs-weight":
        return due + _depth_first([(one, memory.match_of(one)) for one in others])
    return due + sorted(others, key=lambda one: -memory.hit_pages(one))


def overtake(started: SpecifiedRequest, waiting: Sequence[SpecifiedRequest], limits: Limits) -> list[SpecifiedRequest]:
    """**Overtaken**: count and return the earlier requests that still wait; with priorities only the first of them."""
    overtaken = [one for one in waiting if one.arrival < started.arrival]
    if limits.schedule_policy == "priority":
        overtaken = [one for one in overtaken if one is waiting[0]]
    started.overtaken = 0
    for one in overtaken:
        one.overtaken += 1
    return overtaken


def victim_order(request: SpecifiedRequest) -> tuple[int, int]:
    """**Victim**: the sort key: of the lowest priority, the latest to arrive comes last."""
    return -request.priority, request.arrival


def _depth_first(hits: list[tuple[SpecifiedRequest, Sequence[Page]]]) -> list[SpecifiedRequest]:
    """**Order**: below a page, first the requests that continue to a child, the child with most requests first."""
    order: list[SpecifiedRequest] = []
    groups = [(0, hits)]
    while groups:
        depth, group = groups.pop()
        if not group or len(group[0][1]) < depth:
            order += [request for request, _ in group]
            continue
        pages = dict.fromkeys([prefix[depth] for _, prefix in group if len(prefix) > depth])
        below = [[hit for hit in group if hit[1][depth : depth + 1] == [page]] for page in pages]
        # Children are walked from the last: a request that ends here, at a depth that others pass, waits for all of
        # them.
        groups.append((depth + 1, [hit for hit in group if len(hit[1]) == depth]))
        groups += [(depth + 1, one) for one in sorted(below, key=lambda one: (len(one), -one[0][0].arrival))]
    return order


def _by_priority(request: SpecifiedRequest) -> int:
    return -request.priority


# -- time limits --


def out_of_time(
    live: Iterable[SpecifiedRequest], limits: Limits, now: float
) -> list[tuple[float, int, str, SpecifiedRequest]]:
    """Return the requests past their deadline, by deadline, then by arrival, each with the name of its limit."""
    limited = [request for request in live if request.has_time_limit]
    ends = [(end, request) for request in limited if (end := _deadline_of(request, limits)) is not None]
    return sorted([(at, request.arrival, says, request) for (at, says), request in ends if now >= at])


def next_deadline(calls: tuple[float | None, ...], live: Collection[SpecifiedRequest], limits: Limits) -> float | None:
    """Return the earliest deadline of deferred calls, transfers and requests."""
    if not live and calls.count(None) == len(calls):
        return None
    limited = [request for request in live if request.has_time_limit]
    ends = [end[0] for request in limited if (end := _deadline_of(request, limits)) is not None]
    return min([*ends, *[call for call in calls if call is not None]], default=None)


def _deadline_of(request: SpecifiedRequest, limits: Limits) -> tuple[float, str] | None:
    """**Time limits**: a request's first deadline and the name of its limit; None without a limit."""
    own, waiting = request.message.timeout_s, (request.message.waiting_timeout_s, limits.waiting_timeout_s)
    given = [] if own is None else [(own, f" timeout_s is {own:g};")]
    if waiting != (None, None) and not (request.owns_memory or request.retractions):
        given += [(one, f" waiting_timeout_s is {one:g};") for one in waiting if one is not None]
    if not given:
        return None
    limit_s, says = min(given, key=lambda one: one[0])
    return request.since + limit_s, says
