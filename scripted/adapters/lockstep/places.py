"""Where requests are when something happens, and what is in flight then: for coverage."""

from __future__ import annotations

from engine.plan import ForwardMode
from engine.scheduler import Place, Scheduler
from engine.scheduler.books import Launched

_OUT_OF_REACH = "not alive"


def place_of(scheduler: Scheduler, rid: str | None) -> tuple[str, str]:
    """The request's place, or with None all that are occupied; and what is in flight."""
    if rid is None:
        places = sorted({request.place.value for request in scheduler.books.live()})
        return "+".join(places) or "no request", _pipeline(scheduler)
    request = scheduler.find_request(rid)
    return _OUT_OF_REACH if request is None else request.place.value, _pipeline(scheduler)


def _pipeline(scheduler: Scheduler) -> str:
    """Empty, full, or the kinds of what is in flight; a last chunk is what a first token comes from."""
    flights = scheduler.books.in_flight
    if not flights:
        return "empty"
    kinds = {_kind(launched) for launched in flights}
    full = "full: " if len(flights) >= scheduler.limits.depth else ""
    return full + "+".join(sorted(kinds))


def _kind(launched: Launched) -> str:
    mode = launched.microbatch.mode
    if mode is not ForwardMode.PREFILL:
        return mode.value
    return "last chunk" if launched.requests and launched.requests[0].place is Place.DISPATCHED else "chunk"
