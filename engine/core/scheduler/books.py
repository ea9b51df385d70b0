"""The books: the place of every live request, and the microbatches in flight.

One registry and one place for each request. ``is_quiescent`` and ``is_fully_idle`` are defined here and nowhere else;
every destructive operation asks them.
"""

from __future__ import annotations

import bisect
from collections import deque

import msgspec

from engine.core.messages import PauseMode, Sleep, UpdateWeights, Wake
from engine.core.plan import Microbatch
from engine.core.scheduler.request import (
    CHUNKED,
    DELIVERING,
    DISPATCHED,
    RECEIVING,
    RELEASING,
    RETRACTING,
    RUNNING,
    WAITING,
    Request,
)


class Launched(msgspec.Struct, frozen=True, gc=False):
    """A microbatch in flight. ``requests`` has the request of each segment, in the same order.

    It was launched in step ``step``, at ``time`` in seconds.
    """

    microbatch: Microbatch
    requests: tuple[Request, ...]
    step: int
    time: float


class Books:
    """Every request that is alive or still owns memory, each in exactly one place.

    ``requests`` registers the requests that have not ended, by rid. ``waiting`` is in order of arrival. A request whose
    whole prompt is launched, but whose result is not back, is only in ``in_flight``.
    """

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting: list[Request] = []
        self.chunked: Request | None = None
        self.running: dict[str, Request] = {}
        self.retracting: list[Request] = []
        self.releasing: list[Request] = []
        # Requests that receive the KV of their prompt or deliver the last part of it, by rid, in the order of their
        # start.
        self.transferring: dict[str, Request] = {}
        # Transfers that the stages have not ended; their requests may have finished before.
        self.open_transfers = 0
        self.in_flight: deque[Launched] = deque()
        self.paused: PauseMode | None = None
        # The weight update that is requested or in flight. Nothing else is launched meanwhile.
        self.update: UpdateWeights | None = None
        # The stages' weights: the path of the last update, '' for the configured model.
        self.weights = ""
        # Sleep and wake calls not yet carried out; the first may be in flight. See ``Sleeping``.
        self.turns: list[Sleep | Wake] = []
        self.sleep_level = 0
        # True while there is no such call and the stages are awake: requests may be computed.
        self.is_awake = True

    # -- the one idle predicate --

    @property
    def is_quiescent(self) -> bool:
        """True when nothing is in flight and no request owns memory. Waiting requests own nothing and do not count."""
        prefills = self.chunked is not None or self.transferring
        memory_is_owned = prefills or self.running or self.retracting or self.releasing
        return not memory_is_owned and self.nothing_in_flight

    @property
    def is_fully_idle(self) -> bool:
        """True when quiescent, and nothing waits."""
        return not self.waiting and self.is_quiescent

    @property
    def nothing_in_flight(self) -> bool:
        """True when no microbatch or transfer is pending, and no update, sleep or wake is about to be launched."""
        return not self.in_flight and self.update is None and not (self.turns or self.open_transfers)

    def next_received(self) -> Request | None:
        """Return the first request whose pages have arrived, or never will; None while a prompt is partly prefilled."""
        if self.chunked is not None:
            return None
        return next((one for one in self.transferring.values() if one.place is RECEIVING and not one.in_flight), None)

    def what_is_busy(self) -> str:
        """List the counts that keep the engine from being idle, as ``name=count`` pairs."""
        transfers = len(self.transferring)
        return (
            f"waiting={len(self.waiting)} chunked={int(self.chunked is not None)} running={len(self.running)} "
            f"in_flight={len(self.in_flight) or int(self.update is not None or bool(self.turns))} "
            f"releasing={len(self.retracting) + len(self.releasing)}{f' transferring={transfers}' if transfers else ''}"
        )

    # -- moving requests --

    def enqueue(self, request: Request) -> None:
        """Put a request into the queue at its place by arrival, which it keeps when it is retracted."""
        request.place = WAITING
        self.requests[request.rid] = request
        bisect.insort(self.waiting, request, key=_arrival)

    def take_out(self, request: Request) -> None:
        """Remove a request from its place only."""
        place = request.place
        if place is WAITING:
            index = bisect.bisect_left(self.waiting, request.arrival, key=_arrival)
            assert self.waiting[index] is request, f"{request} is not at its place by arrival in the queue"
            del self.waiting[index]
        elif place is CHUNKED:
            self.chunked = None
        elif place is RUNNING:
            del self.running[request.rid]
        elif place is RETRACTING:
            self.retracting.remove(request)
        elif place is RELEASING:
            self.releasing.remove(request)
        elif place is RECEIVING or place is DELIVERING:
            del self.transferring[request.rid]

    def launch(self, launched: Launched) -> None:
        """Book a microbatch as in flight, after the others."""
        self.in_flight.append(launched)

    def land(self) -> Launched:
        """Take the oldest microbatch out of flight."""
        return self.in_flight.popleft()

    def in_flight_ids(self) -> tuple[int, ...]:
        """Return the ids of the microbatches in flight, in launch order."""
        return tuple([launched.microbatch.id for launched in self.in_flight])

    # -- all requests --

    def live(self) -> list[Request]:
        """Return every request in every place; a request in two places appears twice.

        A ``DISPATCHED`` request is found only in the microbatches in flight.
        """
        place = DISPATCHED
        dispatched = [one for launched in self.in_flight for one in launched.requests if one.place is place]
        chunked = () if self.chunked is None else (self.chunked,)
        owners = (*self.running.values(), *self.transferring.values(), *self.retracting, *self.releasing)
        others = (*self.waiting, *chunked, *owners)
        return [*others, *dict.fromkeys(dispatched)] if dispatched else [*others]


def _arrival(request: Request) -> int:
    return request.arrival
