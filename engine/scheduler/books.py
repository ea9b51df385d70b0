"""The books: where every live request is, and which microbatches are in flight.

One registry and one place for each request. ``is_quiescent`` and ``is_fully_idle`` are defined here and nowhere else;
all that is destructive asks them.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Iterator
from typing import Final

import msgspec

from engine.errors import IntegrityError
from engine.memory import Lease
from engine.messages import PauseMode, UpdateWeights
from engine.plan import Microbatch
from engine.scheduler.request import Place, Request

__all__ = ["Books", "Launched"]

# An audit that comes so seldom that more requests than this were noted must look at everything.
_NOTES_LIMIT: Final = 4096


class Launched(msgspec.Struct, frozen=True, gc=False):
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
        # The weight update that is asked for or in flight. Nothing else is launched meanwhile.
        self.update: UpdateWeights | None = None
        # Requests that changed since an audit last looked; nothing is noted until there is an audit.
        self.changed: deque[Request] = deque(maxlen=_NOTES_LIMIT)
        self._noting = False

    # -- the one idle predicate --

    @property
    def is_quiescent(self) -> bool:
        """Nothing in flight and no request owns memory. Requests that wait own nothing and do not count."""
        nobody_owns_memory = self.chunked is None and not (self.running or self.retracting or self.releasing)
        return nobody_owns_memory and self.nothing_in_flight

    @property
    def is_fully_idle(self) -> bool:
        """Quiescent, and nothing waits."""
        return not self.waiting and self.is_quiescent

    @property
    def nothing_in_flight(self) -> bool:
        """No dispatched microbatch is still to come back, and none that updates the weights is about to be."""
        return not self.in_flight and self.update is None

    def what_is_busy(self) -> str:
        """The counts that stand between the engine and idleness, as ``name=count`` pairs."""
        return (
            f"waiting={len(self.waiting)} chunked={int(self.chunked is not None)} running={len(self.running)} "
            f"in_flight={len(self.in_flight) or int(self.update is not None)} "
            f"releasing={len(self.retracting) + len(self.releasing)}"
        )

    # -- moving requests --

    def enqueue(self, request: Request) -> None:
        """Put a request into the queue at its place by arrival: one that was retracted does not lose it."""
        self._note(request)
        request.place = Place.WAITING
        self.requests[request.rid] = request
        bisect.insort(self.waiting, request, key=_arrival)

    def take_out(self, request: Request) -> None:
        """Remove a request from the place where it is, and from nothing else."""
        self._note(request)
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

    def launch(self, launched: Launched) -> None:
        """Book a microbatch as in flight, behind the others."""
        self.in_flight.append(launched)
        if self._noting:
            self.changed.extend(launched.requests)

    def land(self) -> Launched:
        """Take the microbatch that was launched first out of flight."""
        launched = self.in_flight.popleft()
        if self._noting:
            self.changed.extend(launched.requests)
        return launched

    def in_flight_ids(self) -> tuple[int, ...]:
        """Ids of the microbatches in flight, in launch order."""
        return tuple([launched.microbatch.id for launched in self.in_flight])

    # -- the books' own audit --

    @property
    def notes_overflowed(self) -> bool:
        """True when changes may have been lost."""
        return len(self.changed) == _NOTES_LIMIT

    def start_noting(self) -> None:
        """Note from now on which requests change."""
        self.changed.clear()
        self._noting = True

    def leases(self) -> list[Lease]:
        """Every lease that is alive, each once."""
        return [request.lease for request in self._owners() if request.lease is not None]

    def live(self) -> list[Request]:
        """Every request in every place; one that is in two places is in the list twice."""
        return [*self.waiting, *self._owners()]

    def check_integrity(self) -> None:
        """Every live request is in exactly one place and every count of microbatches in flight is true."""
        flights: dict[Request, int] = {}
        for launched in self.in_flight:
            for request in launched.requests:
                flights[request] = flights.get(request, 0) + 1
        live = self.live()
        for request in live:
            self.check_request(request)
            if request.in_flight != flights.pop(request, 0):
                raise IntegrityError(f"{request} is not in as many microbatches in flight")
        if flights:
            raise IntegrityError(f"{list(flights)} are in flight, but in no place")
        if len(set(live)) != len(live):
            raise IntegrityError(f"a request is in two places: {live}")
        if len(self.requests) + len(self.releasing) != len(live):
            raise IntegrityError(f"{list(self.requests.values())} are registered, but {live} are in a place")

    def check_request(self, request: Request) -> None:
        """One request by itself: it is where it says, registered while it lives, and owns what its place allows."""
        place, lease = request.place, request.lease
        ended = place is Place.RELEASING or place is Place.GONE
        if not self._is_in_place(request):
            raise IntegrityError(f"{request} is not where it says")
        if (self.requests.get(request.rid) is request) is ended or (request.finish_reason is None) is ended:
            raise IntegrityError(f"{request} (end: {request.finish_reason}) is registered or alive, but not both")
        if (lease is None) is not (place is Place.WAITING or place is Place.GONE):
            raise IntegrityError(f"{request} owns memory where it must not, or none where it must")
        if not request.in_flight and place in _ONLY_IN_FLIGHT:
            raise IntegrityError(f"{request} is not in flight")

    def _is_in_place(self, request: Request) -> bool:
        place = request.place
        if place is Place.RUNNING:
            return self.running.get(request.rid) is request
        if place is Place.CHUNKED:
            return self.chunked is request
        if place is Place.WAITING:
            index = bisect.bisect_left(self.waiting, request.arrival, key=_arrival)
            return index < len(self.waiting) and self.waiting[index] is request
        if place is Place.RETRACTING or place is Place.RELEASING:
            return request in (self.retracting if place is Place.RETRACTING else self.releasing)
        return True

    def _note(self, request: Request) -> None:
        if self._noting:
            self.changed.append(request)

    def _owners(self) -> Iterator[Request]:
        """Every request that should own memory; one that is dispatched is found only in the microbatches in flight."""
        if self.chunked is not None:
            yield self.chunked
        yield from self.running.values()
        yield from self.retracting
        yield from self.releasing
        flying = [request for launched in self.in_flight for request in launched.requests]
        yield from dict.fromkeys(request for request in flying if request.place is Place.DISPATCHED)


# Requests that have nothing in flight leave these places at once.
_ONLY_IN_FLIGHT: Final = (Place.DISPATCHED, Place.RETRACTING, Place.RELEASING)


def _arrival(request: Request) -> int:
    return request.arrival
