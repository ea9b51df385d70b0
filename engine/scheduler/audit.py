"""The audit of the scheduler step by step: where every request is and how often it is in flight, by tallies of its own.

It looks only at what changed since it last looked. ``Books.check_integrity`` and ``KVMemory.check_integrity`` are the full audit
that it starts from.
"""

from __future__ import annotations

from collections import deque

from engine.errors import IntegrityError
from engine.memory import KVMemory, MemoryAudit
from engine.scheduler.books import Books, Launched
from engine.scheduler.request import Place, Request

__all__ = ["Audit"]


class Audit:
    """Made when everything balances: right after a full audit."""

    def __init__(self, books: Books, memory: KVMemory) -> None:
        self._books = books
        self._memory = MemoryAudit(memory, books.leases())
        self._places: dict[Request, Place] = {}
        self._counts = dict.fromkeys(Place, 0)
        # The microbatches in flight as of the last look, and how often each request was in them.
        self._flights: deque[Launched] = deque()
        self._in_flight: dict[Request, int] = {}
        books.start_noting()
        self._follow_flights()
        for request in books.live():
            self._follow(request)

    @property
    def is_outdated(self) -> bool:
        """True when a new audit must start from the full one."""
        return self._memory.is_outdated or self._books.notes_overflowed

    def check(self) -> None:
        """Follow what changed and compare. Raises IntegrityError that names what does not balance."""
        changed = self._books.changed
        if changed:
            self._follow_flights()
            for request in set(changed):
                self._follow(request)
            changed.clear()
        self._memory.check()
        self._check_counts()

    def _follow_flights(self) -> None:
        """Count microbatches out at the front and in at the back: they come back in launch order."""
        now, seen, counts = self._books.in_flight, self._flights, self._in_flight
        while seen and not (now and seen[0] is now[0]):
            for request in seen.popleft().requests:
                counts[request] -= 1
                if not counts[request]:
                    del counts[request]
        for index in range(len(seen), len(now)):
            seen.append(now[index])
            for request in now[index].requests:
                counts[request] = counts.get(request, 0) + 1

    def _follow(self, request: Request) -> None:
        before = self._places.pop(request, None)
        if before is not None:
            self._counts[before] -= 1
        self._books.check_request(request)
        if request.in_flight != self._in_flight.get(request, 0):
            raise IntegrityError(f"{request} is in {self._in_flight.get(request, 0)} microbatches in flight")
        if request.place is not Place.GONE:
            self._places[request] = request.place
            self._counts[request.place] += 1

    def _check_counts(self) -> None:
        books, counts = self._books, self._counts
        tallied = (
            counts[Place.WAITING],
            counts[Place.CHUNKED],
            counts[Place.RUNNING],
            counts[Place.RETRACTING],
            counts[Place.RELEASING],
            len(self._places) - counts[Place.RELEASING],
            len(self._places) - counts[Place.WAITING],
        )
        booked = (
            len(books.waiting),
            int(books.chunked is not None),
            len(books.running),
            len(books.retracting),
            len(books.releasing),
            len(books.requests),
            self._memory.live_leases,
        )
        if tallied != booked:
            raise IntegrityError(
                f"(waiting, chunked, running, retracting, releasing, registered, leases) are {booked}, but the requests "
                f"say {tallied}"
            )
