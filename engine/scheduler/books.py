"""The books: where every live request is, and which microbatches are in flight.

One registry and one place for each request. ``is_quiescent`` and ``is_fully_idle`` are defined here and nowhere else; all
that is destructive asks them.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator

import msgspec

from engine.errors import IntegrityError
from engine.memory import Lease
from engine.messages import PauseMode
from engine.plan import Microbatch
from engine.scheduler.request import Place, Request

__all__ = ["Books", "Launched"]


class Launched(msgspec.Struct, frozen=True):
    """A microbatch in flight: ``requests`` are those of its segments, in the same order."""

    microbatch: Microbatch
    requests: tuple[Request, ...]
    step: int


class Books:
    """Every request that is alive or whose memory is not yet free, each in exactly one place.

    ``requests`` registers what has not ended, by rid. ``waiting`` is in order of arrival. Requests whose prompt is all
    dispatched but whose result is not back are found through ``in_flight`` alone.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.chunked: Request | None = None
        self.running: dict[str, Request] = {}
        self.retracting: list[Request] = []
        self.releasing: list[Request] = []
        self.in_flight: deque[Launched] = deque()
        self.paused: PauseMode | None = None

    # -- the one idle predicate --

    @property
    def is_quiescent(self) -> bool:
        """Nothing in flight and no request owns memory. Requests that wait own nothing and do not count."""
        return self.nothing_in_flight and self.chunked is None and not (self.running or self.retracting or self.releasing)

    @property
    def is_fully_idle(self) -> bool:
        """Quiescent, and nothing waits."""
        return not self.waiting and self.is_quiescent

    @property
    def nothing_in_flight(self) -> bool:
        """No dispatched microbatch is still to come back."""
        return not self.in_flight

    def what_is_busy(self) -> str:
        """The counts that stand between the engine and idleness, as ``name=count`` pairs."""
        return (
            f"waiting={len(self.waiting)} chunked={int(self.chunked is not None)} running={len(self.running)} "
            f"in_flight={len(self.in_flight)} releasing={len(self.retracting) + len(self.releasing)}"
        )

    # -- moving requests --

    def enqueue(self, request: Request) -> None:
        """Put a request into the queue at its place by arrival: one that was retracted does not lose it."""
        request.place = Place.WAITING
        self.requests[request.rid] = request
        bisect.insort(self.waiting, request, key=_arrival)

    def take_out(self, request: Request) -> None:
        """Remove a request from the place where it is, and from nothing else."""
        place = request.place
        if place is Place.WAITING:
            index = bisect.bisect_left(self.waiting, request.arrival, key=_arrival)
            assert self.waiting[index] is request, f"{request} is not where its arrival puts it in the queue"
            del self.waiting[index]
        elif place is Place.CHUNKED:
            self.chunked = None
        elif place is Place.RUNNING:
            del self.running[request.rid]
        elif place is Place.RETRACTING:
            self.retracting.remove(request)
        elif place is Place.RELEASING:
            self.releasing.remove(request)

    def in_flight_ids(self) -> tuple[int, ...]:
        """Ids of the microbatches in flight, in launch order."""
        return tuple([launched.microbatch.id for launched in self.in_flight])

    # -- the books' own audit --

    def leases(self) -> list[Lease]:
        """Every lease that is alive, each once."""
        owners = {id(request): request for request in self._owners()}
        return [request.lease for request in owners.values() if request.lease is not None]

    def check_integrity(self) -> None:
        """Every live request is in exactly one place and every count of microbatches in flight is true."""
        flights: dict[int, int] = {}
        for launched in self.in_flight:
            for request in launched.requests:
                flights[id(request)] = flights.get(id(request), 0) + 1
        seen: set[int] = set()
        for request in self._owners():
            self._check_place(request)
            if request.in_flight != flights.get(id(request), 0):
                raise IntegrityError(f"{request} is in {flights.get(id(request), 0)} microbatches in flight")
            seen.add(id(request))
        for request in self.waiting:
            if request.place is not Place.WAITING or request.lease is not None or request.in_flight:
                raise IntegrityError(f"{request} waits, but owns something or is elsewhere")
            if id(request) in seen:
                raise IntegrityError(f"{request} is in the queue twice, or in the queue and elsewhere")
            seen.add(id(request))
        for request in self.requests.values():
            if id(request) not in seen or request.is_finished:
                raise IntegrityError(f"{request} is registered, but is in no place or has ended")

    def _check_place(self, request: Request) -> None:
        registered = self.requests.get(request.rid) is request
        if request.place is Place.RELEASING:
            if registered or not request.is_finished or not request.in_flight:
                raise IntegrityError(f"{request} is being released, but is registered, alive or not in flight")
        elif not registered:
            raise IntegrityError(f"{request} owns memory, but is not registered")
        if request.lease is None:
            raise IntegrityError(f"{request} is {request.place}, but owns no memory")

    def _owners(self) -> Iterator[Request]:
        """Every request that should own memory; one that is dispatched is found only in the microbatches in flight."""
        if self.chunked is not None:
            yield self.chunked
        yield from self.running.values()
        yield from self.retracting
        yield from self.releasing
        dispatched = {
            id(request): request
            for launched in self.in_flight
            for request in launched.requests
            if request.place is Place.DISPATCHED
        }
        yield from dispatched.values()


def _arrival(request: Request) -> int:
    return request.arrival
