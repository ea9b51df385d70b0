"""Where requests are when something happens, and what is in flight then: for coverage, and for abstract states."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from engine.plan import ForwardMode
from engine.scheduler import Place, Scheduler
from engine.scheduler.books import Launched

_OUT_OF_REACH = "not alive"
# Of more pages, readers and microbatches a state says no more than that.
_MANY: Final = 2


def place_of(scheduler: Scheduler, rid: str | None) -> tuple[str, str]:
    """The request's place, or with None all that are occupied; and what is in flight."""
    if rid is None:
        places = sorted({request.place.value for request in scheduler.books.live()})
        return "+".join(places) or "no request", _pipeline(scheduler)
    request = scheduler.find_request(rid)
    return _OUT_OF_REACH if request is None else request.place.value, _pipeline(scheduler)


def relations_of(scheduler: Scheduler) -> Hashable:
    """How requests stand to memory, to each other and to what they wait for; what has happened at all so far."""
    books, pages, counters = scheduler.books, scheduler.memory.pages, scheduler.counters
    requests = frozenset([
        (
            request.place.value,
            min(request.in_flight, _MANY),
            request.retractions > 0,
            request.cached_tokens > 0,
            0 if request.lease is None else min(request.lease.node.lock_ref, _MANY),
            bool(request.guesses),
            request.grammar is None or request.grammar.is_ready,
            request.lacks_lora,
            request.is_finished,
            request.overtaken > 0,
        )
        for request in books.live()
    ])  # fmt: skip
    flights = tuple([(_kind(one), min(len(one.requests), _MANY)) for one in books.in_flight])
    memory = (
        min(pages.free, _MANY),
        min(pages.cached, _MANY),
        scheduler.memory.rows.free > 0,
        scheduler.pressure.is_on,
    )
    happened = counters.retractions > 0, counters.requests_timed_out > 0, counters.weights_version > 0
    waits = (
        books.paused,
        books.sleep_level,
        books.update is not None,
        scheduler.controls.deadline is not None,
        scheduler.failure is not None,
    )
    return requests, flights, memory, happened, waits, scheduler.grammars.waiting > 0


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
