"""The time limits of the executable specification: when a request ends because its time is over.

Names in bold are the rules of docs/architecture.md, "The rules of a step". It ends nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from engine.limits import Limits
from scripted.adapters.lockstep.specification.request import SpecifiedRequest


def out_of_time(
    live: Iterable[SpecifiedRequest], limits: Limits, now: float
) -> list[tuple[float, int, str, SpecifiedRequest]]:
    """Those whose time is over, by deadline, then by arrival; each with what its client is told."""
    limited = [request for request in live if request.has_time_limit]
    ends = [(end, request) for request in limited if (end := _deadline_of(request, limits)) is not None]
    return sorted([(at, request.arrival, says, request) for (at, says), request in ends if now >= at])


def next_deadline(calls: tuple[float | None, ...], live: Collection[SpecifiedRequest], limits: Limits) -> float | None:
    """The first deadline of all: of the calls and transfers that wait, and of the requests."""
    if not live and calls.count(None) == len(calls):
        return None
    limited = [request for request in live if request.has_time_limit]
    ends = [end[0] for request in limited if (end := _deadline_of(request, limits)) is not None]
    return min([*ends, *[call for call in calls if call is not None]], default=None)


def _deadline_of(request: SpecifiedRequest, limits: Limits) -> tuple[float, str] | None:
    """**Time limits**: the first deadline of a request, with what its client is told of it; None without one."""
    own, waiting = request.message.timeout_s, (request.message.waiting_timeout_s, limits.waiting_timeout_s)
    given = [] if own is None else [(own, f" timeout_s is {own:g};")]
    if waiting != (None, None) and not (request.owns_memory or request.retractions):
        given += [(one, f" waiting_timeout_s is {one:g};") for one in waiting if one is not None]
    if not given:
        return None
    limit_s, says = min(given, key=lambda one: one[0])
    return request.since + limit_s, says
