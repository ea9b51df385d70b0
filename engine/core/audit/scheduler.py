"""The audit of a scheduler: every live request is in one place and owns what that place allows; then its memory.

It looks at everything and changes nothing.
"""

from __future__ import annotations

import bisect
from typing import Final

from engine.core.audit.memory import check_host, check_memory
from engine.core.errors import IntegrityError
from engine.core.memory import HostTier, SlidingWindowPool
from engine.core.scheduler import Books, Place, Request, Scheduler
from engine.core.scheduler.grammars import Grammars
from engine.core.scheduler.request import CHUNKED, DELIVERING, GONE, RECEIVING, RELEASING, RETRACTING, RUNNING, WAITING
from engine.core.scheduler.transfers import Transfers

# Requests that have nothing in flight leave these places at once.
_ONLY_IN_FLIGHT: Final = (Place.DISPATCHED, RETRACTING, RELEASING, DELIVERING)


def audit(scheduler: Scheduler) -> None:
    """Check all books and the memory against each other, at a cost that grows with the cache and the live requests.

    Raises IntegrityError, which names the first mismatch.
    """
    books, memory = scheduler.books, scheduler.memory
    live = books.live()
    _check_books(books, live, scheduler.transfers)
    if scheduler.time_limits.deadline is not None:
        _check_time_limits(scheduler)
    if scheduler.limits.max_loras:
        _check_loras(scheduler, live)
    check_memory(memory, [request.lease for request in live if request.lease is not None], scheduler.pressure.pins)
    if memory.sliding_window is not None:
        _check_window(books, memory.sliding_window)
    if memory.host is not None:
        _check_copies(books, memory.host)
    if scheduler.grammars.known:
        _check_grammars(scheduler.grammars, live)


def _check_books(books: Books, live: list[Request], transfers: Transfers) -> None:
    """Every live request is in exactly one place, and every count of what is in flight is true."""
    flights: dict[Request, int] = {}
    if books.open_transfers:
        for request in transfers.requests():
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
    """One request by itself: it is where it says, registered while it lives, and owns what its place allows."""
    place, lease = request.place, request.lease
    ended = place is RELEASING or place is GONE
    # Most of them run.
    placed = books.running.get(request.rid) is request if place is RUNNING else _is_in_place(books, request)
    if not placed:
        raise IntegrityError(f"{request} is not where it says")
    if (books.requests.get(request.rid) is request) is ended or (request.finish_reason is None) is ended:
        raise IntegrityError(f"{request} (end: {request.finish_reason}) is registered or alive, but not both")
    if (lease is None) is not (place is WAITING or place is GONE):
        raise IntegrityError(f"{request} owns memory where it must not, or none where it must")
    if not request.in_flight and place in _ONLY_IN_FLIGHT:
        raise IntegrityError(f"{request} is not in flight")


def _check_time_limits(scheduler: Scheduler) -> None:
    """Only what lives can run out of time, and what has started is not bound to start."""
    for request, must_start in scheduler.time_limits.entries():
        if scheduler.books.requests.get(request.rid) is not request:
            raise IntegrityError(f"{request} has a time limit, but has ended")
        if must_start and (request.lease is not None or request.retractions):
            raise IntegrityError(f"{request} has started, but may still run out of the time to start")


def _is_in_place(books: Books, request: Request) -> bool:
    """Whether a request that does not run is where it says."""
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


def _check_grammars(grammars: Grammars, live: list[Request]) -> None:
    """Every request that is not gone is a user of its grammar, and there are no other users."""
    users = {request: known for known in grammars.entries for request in known.users}
    owed = {request: request.grammar for request in live if request.grammar is not None}
    if users != owed:
        raise IntegrityError(f"the users of grammars are {list(users)}, but {list(owed)} are to follow one")


def _check_loras(scheduler: Scheduler, live: list[Request]) -> None:
    """What owns memory is computed with a LoRA that is resident, and no more are than may be."""
    loras = scheduler.loras
    for request in live:
        if request.lease is not None and request.lease.kv_key != request.kv_key:
            raise IntegrityError(
                f"{request} is computed with version {request.lease.kv_key[0]} of {request.lora}, which the stages "
                f"do not hold any more, or for the salt {request.lease.kv_key[1]}, which it does not have"
            )
        if request.lora is not None and loras.known.get(request.lora.name) is not request.lora:
            raise IntegrityError(f"{request} is computed with {request.lora}, which was unloaded")
    if loras.resident > scheduler.limits.max_loras:
        raise IntegrityError(f"{loras.resident} LoRAs are resident, max_loras={scheduler.limits.max_loras}")


def _check_copies(books: Books, host: HostTier) -> None:
    """Every copy in flight is between pages that are its own until it is back."""
    if host.due_in:
        raise IntegrityError(f"pages are to be loaded from the host, {host.due_in}, but no microbatch carries that out")
    written: list[int] = []
    read: list[int] = []
    for launched in books.in_flight:
        copies = launched.microbatch.copies
        if copies is None:
            continue
        written += [number for _, number in copies.out]
        read += [number for number, _ in copies.into]
        held = {page for one in launched.requests if one.lease is not None for page in one.lease.pages}
        if strange := [page for _, page in copies.into if page not in held]:
            raise IntegrityError(f"microbatch {launched.microbatch.id} loads pages {strange} of none of its requests")
    check_host(host, written, read)


def _check_window(books: Books, window: SlidingWindowPool) -> None:
    """Nothing in flight can see a window page that its request has given back."""
    for launched in books.in_flight:
        for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True):
            lease, first = request.lease, window.first_page(segment.start)
            if lease is not None and lease.window_start > first:
                raise IntegrityError(
                    f"microbatch {launched.microbatch.id} sees {request.rid} from page {first} on, but its window "
                    f"pages before place {lease.window_start} are given back"
                )
