"""The engine's scheduler as a machine of the search, with the interventions of an operator."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from engine.core.errors import IntegrityError
from engine.core.instruments import Pressure, SilentDigests
from engine.core.limits import Limits
from engine.core.memory import KVMemory
from engine.core.messages import Event, Generate, OperatorEvent, ReleasePressure, SetPressure
from engine.core.plan import ForwardMode
from engine.core.scheduler import Launched, Place, Scheduler, StepResult
from scripted.core.promises import CachedPrefix
from scripted.core.violation import Violation
from scripted_lockstep.actions.client_requests import PREFILL_ENGINE


class EngineMachine:
    """Drives a scheduler: a new one with these limits, or a server's. ``is_pressed``: an operator reserves memory."""

    def __init__(self, limits: Limits, *, digests: bool, scheduler: Scheduler | None = None) -> None:
        self.limits = limits
        self.depth = limits.depth
        self.scheduler = Scheduler(limits) if scheduler is None else scheduler
        if not digests:
            self.scheduler.digests = SilentDigests()
        self.is_pressed = False
        # Chooses the prefill engine of a request to a decode engine.
        self.choose_prefill: Callable[[Generate], str | None] = _default_prefill

    def step(self, events: Sequence[Event], now: float) -> StepResult:
        return self.scheduler.step(events, now)

    @property
    def is_idle(self) -> bool:
        return self.scheduler.is_fully_idle

    def counts(self) -> Mapping[str, int]:
        books, pages = self.scheduler.books, self.scheduler.memory.pages
        return {
            "waiting": len(books.waiting),
            "running": len(books.running),
            "in_flight": len(books.in_flight),
            "pages_free": pages.free,
            "pages_cached": pages.cached,
        }

    # -- for promises --

    def open_rids(self) -> Collection[str]:
        """Return the rids of all requests that have not ended."""
        return self.scheduler.books.requests.keys()

    def queries(self) -> Mapping[str, Callable[[], object]]:
        """Return the queries that may run between steps: statistics, busy counts, and hits of waiting requests."""
        scheduler, tree = self.scheduler, self.scheduler.memory.tree
        waiting = [*scheduler.books.waiting]
        return {
            "stats": scheduler.stats,
            "busy": lambda: str(scheduler.books.what_is_busy()),
            "hits": lambda: [tree.match_length(request.ids, request.kv_key) for request in waiting],
        }

    def cached_prefixes(self) -> Iterator[CachedPrefix]:
        """Yield the path to each leaf of the prefix tree; none if the stages are gone."""
        if self.scheduler.failure is not None:
            return
        tree = self.scheduler.memory.tree
        for leaf in tree.nodes():
            if not leaf.children:
                path = [*tree.path(leaf)][::-1]
                tokens = itertools.chain.from_iterable(node.tokens for node in path)
                pages = itertools.chain.from_iterable(node.pages for node in path)
                yield CachedPrefix(tuple(tokens), tuple(pages), leaf.kv_key[0])

    def start_over(self) -> None:
        """Reset everything in place, including counters and digest, because the loop and its gate hold the scheduler.

        Raises IntegrityError unless the engine is fully idle. Production never does this.
        """
        if not self.scheduler.is_fully_idle:
            busy = self.scheduler.books.what_is_busy()
            raise IntegrityError(f"a scheduler that is busy cannot start over: {busy}")
        # Attributes that a script has set on the object itself, such as a method, are removed too.
        vars(self.scheduler).clear()
        Scheduler.__init__(self.scheduler, self.limits)
        self.is_pressed = False

    def intervene(self, event: OperatorEvent) -> None:
        """Intervene between two steps, as an operator does, and check the effect at once. Raises Violation."""
        most = _most_left(self.scheduler.pressure)
        self.scheduler.pressure.intervene(event)
        if isinstance(event, SetPressure):
            self.is_pressed = True
            _check_pressure(event, most, self.scheduler.memory)
        elif isinstance(event, ReleasePressure):
            self.is_pressed = False
        _check_is_on(self.scheduler.pressure, self.scheduler.memory)


def _default_prefill(message: Generate) -> str:
    del message
    return PREFILL_ENGINE


def _check_pressure(asked: SetPressure, most: tuple[int, ...], memory: KVMemory) -> None:
    counts = asked.leave_pages, asked.leave_rows, asked.leave_unlocked, asked.leave_window_pages
    for count, limit, left in zip(counts, most, _now_left(memory), strict=True):
        if count is not None and left != min(count, limit):
            raise Violation(f"{count} of at most {limit} were to be left by {asked}, but {left} are")


def _check_is_on(pressure: Pressure, memory: KVMemory) -> None:
    """Check that the engine reports reserved memory exactly while it reserves some: a checkpoint depends on it."""
    window = memory.sliding_window
    kept = memory.pages.reserved + memory.rows.reserved + len(pressure.pins)
    kept += 0 if window is None else window.pages.reserved
    if pressure.is_on is not (kept > 0):
        raise Violation(f"the pressure is said to be {pressure.is_on}, but {kept} pages, rows and nodes are kept back")


def _most_left(pressure: Pressure) -> tuple[int, ...]:
    """Return how many pages, rows, unlocked nodes and window pages the requests leave at most."""
    return (
        pressure.most_free_pages,
        pressure.most_free_rows,
        pressure.most_unlocked_nodes,
        pressure.most_free_window_pages,
    )


def _now_left(memory: KVMemory) -> tuple[int, ...]:
    """Return how many pages, rows, unlocked nodes and window pages are free now."""
    unlocked = sum(1 for node in memory.tree.nodes() if node.lock_ref == 0)
    window = 0 if memory.sliding_window is None else memory.sliding_window.pages.free
    return memory.pages.free, memory.rows.free, unlocked, window


# -- for coverage: the places of requests and the contents of the pipeline at an event --


def place_of(scheduler: Scheduler, rid: str | None) -> tuple[str, str]:
    """Return the request's place, or with None all occupied places, and the state of the pipeline."""
    if rid is None:
        places = sorted({request.place.value for request in scheduler.books.live()})
        return "+".join(places) or "no request", _pipeline(scheduler)
    request = scheduler.find_request(rid)
    return "not alive" if request is None else request.place.value, _pipeline(scheduler)


def _pipeline(scheduler: Scheduler) -> str:
    """Name the pipeline's state: empty, full, or the kinds in flight; a last chunk yields a first token."""
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
