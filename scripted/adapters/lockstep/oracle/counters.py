"""Compares what the engine counts, its books and totals, with the account of its clients; checks an idle engine."""

from __future__ import annotations

from operator import attrgetter
from typing import Final

from engine.messages import EngineStats
from engine.scheduler import Place, Scheduler
from engine.scheduler.sizes import sizes_of
from scripted.adapters.lockstep.oracle.ledger import Ledger
from scripted.adapters.lockstep.oracle.totals import Totals
from scripted.core.violation import Violation

__all__ = ["check_idle", "check_sizes", "compare_counts"]

_TOTALS: Final = tuple(name for name in Totals.__slots__ if name != "retractions")
_NOTHING_OF: Final = (
    "waiting",
    "chunked",
    "running",
    "in_flight",
    "pages_cached",
    "pages_held",
    "alive",
    "pending_prefill_tokens",
    "host_pages_cached",
)
_totals_of: Final = attrgetter(*_TOTALS)


def compare_counts(ledger: Ledger, scheduler: Scheduler) -> None:
    """Compare the account with the engine's books after a step. Raises Violation that names what differs."""
    if ledger.calls.suspicion:
        raise Violation(ledger.calls.suspicion)
    totals, counters = ledger.totals, scheduler.counters
    _compare_lives(ledger, scheduler)
    if counters.retractions != totals.retractions:
        _take_note_of_retractions(ledger, scheduler)
    if not _agree(ledger, scheduler):
        raise Violation("the account and the engine's books differ: " + _differences(ledger, scheduler))
    if _totals_of(counters) != _totals_of(totals):
        for name in _TOTALS:
            if getattr(counters, name) != getattr(totals, name):
                said, true = getattr(counters, name), getattr(totals, name)
                raise Violation(f"{name} is {said}, but the clients' count is {true}")


def check_sizes(scheduler: Scheduler) -> None:
    """The sizes that are in the digest of each step, of an idle and flushed engine. Raises Violation."""
    limits = scheduler.limits
    window = (limits.window_pages, 0) if limits.window_tokens else ()
    host = (limits.host_pages, 0) if limits.host_pages else ()
    sizes = (0, 0, 0, limits.total_pages, 0, limits.rows, *window, *host)
    digested = sizes_of(scheduler.books, scheduler.memory)
    if digested != sizes:
        raise Violation(f"the sizes of an idle engine are digested as {digested}, but they are {sizes}")


def check_idle(scheduler: Scheduler, stats: EngineStats) -> None:
    """What an idle and flushed engine says of itself: everything is free, nothing is going on."""
    limits = scheduler.limits
    check_sizes(scheduler)
    idle = {
        "step": scheduler.step_number,
        "pages_free": limits.total_pages,
        "pages_total": limits.total_pages,
        "rows_free": limits.rows,
        "rows_total": limits.rows,
        "page_size": limits.page_size,
        "host_pages_free": limits.host_pages,
        "host_pages_total": limits.host_pages,
        **dict.fromkeys(_NOTHING_OF, 0),
    }
    for name, value in idle.items():
        if getattr(stats, name) != value:
            raise Violation(f"an idle engine says {name} {getattr(stats, name)}, but it is {value}")


def _compare_lives(ledger: Ledger, scheduler: Scheduler) -> None:
    """What the engine counts for each request of the newest microbatch."""
    in_flight = scheduler.books.in_flight
    for request in in_flight[-1].requests if in_flight else ():
        # Its rid may have a new owner by now.
        life = None if request.is_finished else ledger.live.get(request.rid)
        if life is None:
            continue
        if life.parts != request.chunks_done or life.retractions != request.retractions:
            true, said = (life.parts, life.retractions), (request.chunks_done, request.retractions)
            raise Violation(f"{life.rid} has (parts of its prompt, retractions) {true}, but counted are {said}")


def _take_note_of_retractions(ledger: Ledger, scheduler: Scheduler) -> None:
    """The engine counts retractions. Note which requests they were; only those that may be retracted are accepted."""
    for tenancy in list(ledger.pages.rows.values()):
        request = scheduler.books.requests.get(tenancy.rid)
        if request is not None and request.place is Place.WAITING:
            ledger.retract(tenancy)


def _agree(ledger: Ledger, scheduler: Scheduler) -> bool:
    """Whether every request is where the account has it, and the numbers of rows, launches and retractions agree."""
    books, rows, partial, flights = scheduler.books, scheduler.memory.rows, ledger.partial, ledger.flights
    live, running = ledger.live, books.running
    waiting = runs = 0
    for rid, life in live.items():
        waiting += life.tenancy is None
        if life.running:
            runs += 1
            if rid not in running:
                return False
    return (
        live.keys() == books.requests.keys()
        and runs == len(running)
        and waiting == len(books.waiting)
        and (None if partial is None else partial.rid) == (None if books.chunked is None else books.chunked.rid)
        and len(flights) == len(books.in_flight)
        # Launched and landed in order, so that equal first ones of as many are equal.
        and (not flights or flights[0].id == books.in_flight[0].microbatch.id)
        and len(ledger.pages.rows) == rows.total - rows.free - rows.reserved
        and ledger.totals.retractions == scheduler.counters.retractions
    )


def _differences(ledger: Ledger, scheduler: Scheduler) -> str:
    books, rows, live = scheduler.books, scheduler.memory.rows, ledger.live
    partial, chunked = ledger.partial, books.chunked
    pairs: dict[str, tuple[object, object]] = {
        "alive": (list(live), list(books.requests)),
        "waiting": (ledger.waiting, len(books.waiting)),
        "chunked": (partial and partial.rid, chunked and chunked.rid),
        "running": (sorted(rid for rid, life in live.items() if life.running), sorted(books.running)),
        "in flight": (tuple(flight.id for flight in ledger.flights), books.in_flight_ids()),
        "rows taken": (len(ledger.pages.rows), rows.total - rows.free - rows.reserved),
        "retractions": (ledger.totals.retractions, scheduler.counters.retractions),
    }
    return "; ".join(f"{name} is {a} by the account, {b} by the books" for name, (a, b) in pairs.items() if a != b)
