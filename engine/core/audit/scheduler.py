"""Audits a scheduler: live requests and their memory, the pools, and each feature's own checks. Changes nothing."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Final

from engine.core.errors import IntegrityError
from engine.core.memory.integrity import check_memory
from engine.core.scheduler import Books, Place, Request, Scheduler
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.request import CHUNKED, DELIVERING, GONE, RECEIVING, RELEASING, RETRACTING, RUNNING, WAITING

# A request leaves these places as soon as it has nothing in flight.
_ONLY_IN_FLIGHT: Final = (Place.DISPATCHED, RETRACTING, RELEASING, DELIVERING)


def audit(scheduler: Scheduler) -> None:
    """Check books, memory and features against each other. The cost grows with the cache and the live requests.

    Raises IntegrityError, which names the first mismatch.
    """
    books, memory = scheduler.books, scheduler.memory
    live = books.live()
    _check_books(books, live, scheduler.hooks.in_flight)
    check_memory(memory, [request.lease for request in live if request.lease is not None], scheduler.pressure.pins)
    for feature in scheduler.hooks.check:
        feature.check(live)


def _check_books(books: Books, live: list[Request], ordering: Sequence[Feature]) -> None:
    """Check that each live request is in exactly one place, and recount its microbatches and orders in flight.

    The features ``ordering`` are the ones that have orders in flight.
    """
    flights: dict[Request, int] = {}
    for feature in ordering:
        for request in feature.in_flight():
            flights[request] = flights.get(request, 0) + 1
    for launched in books.in_flight:
        for request in launched.requests:
            flights[request] = flights.get(request, 0) + 1
    for request in live:
        _check_request(books, request)
        if request.in_flight != flights.pop(request, 0):
            raise IntegrityError(f"{request} counts another number of microbatches and transfers than the books")
    if flights:
        raise IntegrityError(f"{list(flights)} are in flight, but in no place")
    if len(set(live)) != len(live):
        raise IntegrityError(f"a request is in two places: {live}")
    if len(books.requests) + len(books.releasing) != len(live):
        raise IntegrityError(f"{list(books.requests.values())} are registered, but {live} are in a place")


def _check_request(books: Books, request: Request) -> None:
    """Check one request: it is in its place, registered while it lives, and owns the memory that its place allows."""
    place, lease = request.place, request.lease
    ended = place is RELEASING or place is GONE
    # First, because most requests run.
    placed = books.running.get(request.rid) is request if place is RUNNING else _is_in_place(books, request)
    if not placed:
        raise IntegrityError(f"{request} is not in the place that it names")
    if (books.requests.get(request.rid) is request) is ended or (request.finish_reason is None) is ended:
        raise IntegrityError(
            f"{request} (finish reason {request.finish_reason}) must be registered exactly until it has finished"
        )
    if (lease is None) is not (place is WAITING or place is GONE):
        raise IntegrityError(
            f"{request} owns memory in a place that allows none, or owns none in a place that needs it"
        )
    if not request.in_flight and place in _ONLY_IN_FLIGHT:
        raise IntegrityError(f"{request} is not in flight")


def _is_in_place(books: Books, request: Request) -> bool:
    """Return whether a request that is not running is in the place that its state names."""
    place = request.place
    if place is CHUNKED:
        return books.chunked is request
    if place is WAITING:
        index = bisect.bisect_left(books.waiting, request.arrival, key=lambda one: one.arrival)
        return index < len(books.waiting) and books.waiting[index] is request
    if place is RETRACTING or place is RELEASING:
        return request in (books.retracting if place is RETRACTING else books.releasing)
    if place is RECEIVING or place is DELIVERING:
        return books.transferring.get(request.rid) is request
    return True
