"""The audit of the scheduler step by step: where every request is and how often it is in flight, by tallies of its own.

It looks only at what changed since it last looked. ``Books.check_integrity`` and ``KVMemory.check_integrity`` are the
full audit that it starts from.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from engine.errors import IntegrityError
from engine.memory import KVMemory, MemoryAudit
from engine.scheduler.books import Books, Launched
from engine.scheduler.request import Place, Request

__all__ = ["Audit"]

# A member of an enum costs a look-up of 40 ns each time it is named, twice the comparison that it is for.
_WAITING: Final = Place.WAITING
_CHUNKED: Final = Place.CHUNKED
_RUNNING: Final = Place.RUNNING
_RETRACTING: Final = Place.RETRACTING
_RELEASING: Final = Place.RELEASING
_GONE: Final = Place.GONE


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
            # In the order of the changes, not of addresses: which fault is named first is part of a replay.
            for request in dict.fromkeys(changed):
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
        if request.place is not _GONE:
            self._places[request] = request.place
            self._counts[request.place] += 1

    def _check_counts(self) -> None:
        books, counts, live = self._books, self._counts, len(self._places)
        # One chain of comparisons: this is run after every step, changed or not.
        balance = (
            len(books.waiting) == counts[_WAITING]
            and (books.chunked is not None) == counts[_CHUNKED]
            and len(books.running) == counts[_RUNNING]
            and len(books.retracting) == counts[_RETRACTING]
            and len(books.releasing) == counts[_RELEASING]
            and len(books.requests) == live - counts[_RELEASING]
            and self._memory.live_leases == live - counts[_WAITING]
        )
        if not balance:
            said = ", ".join(f"{place}={count}" for place, count in counts.items())
            raise IntegrityError(
                f"the requests say {said}, but booked are {books.what_is_busy()} with {len(books.requests)} requests "
                f"registered and {self._memory.live_leases} leases"
            )
