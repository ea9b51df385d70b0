"""The engine's scheduler as a machine of the search: the scheduler itself, and what an operator does to it."""

from __future__ import annotations

from collections.abc import Sequence

from engine.instruments import Pressure
from engine.limits import Limits
from engine.memory import KVMemory
from engine.messages import Event, OperatorEvent, ReleasePressure, SetPressure
from engine.plan import ForwardMode
from engine.scheduler import Place, Scheduler, StepResult
from engine.scheduler.books import Launched
from scripted.actions import Relieve, Resume, ResumeStage
from scripted.subject.action import Action
from scripted.subject.run import Run
from scripted.subject.violation import Violation
from scripted.subjects.lockstep.silent_digests import SilentDigests

__all__ = ["EngineMachine"]

_OUT_OF_REACH = "not alive"


class EngineMachine:
    """A new scheduler of these limits. ``is_pressed``: an operator keeps memory from requests."""

    def __init__(self, limits: Limits, *, digests: bool) -> None:
        self.limits = limits
        self.depth = limits.depth
        self.scheduler = Scheduler(limits)
        if not digests:
            self.scheduler.digests = SilentDigests()
        self.is_pressed = False

    def step(self, events: Sequence[Event], now: float) -> StepResult:
        """One step of the scheduler."""
        return self.scheduler.step(events, now)

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        return self.scheduler.is_fully_idle

    def what_is_busy(self) -> str:
        """The scheduler's own words."""
        return self.scheduler.books.what_is_busy()

    def where(self, rid: str | None) -> tuple[str, str]:
        """The request's place, or with None all that are occupied; and what is in flight."""
        scheduler = self.scheduler
        if rid is None:
            places = sorted({request.place.value for request in scheduler.books.live()})
            state = "+".join(places) or "no request"
        else:
            request = scheduler.find_request(rid)
            state = _OUT_OF_REACH if request is None else request.place.value
        return state, _pipeline(scheduler)

    def obstacle(self, run: Run) -> Action | None:
        """A stage that is stopped, memory that an operator keeps, a pause."""
        if run.stalled:
            return ResumeStage(stage=min(run.stalled))
        if self.is_pressed:
            return Relieve()
        if run.judge.is_paused and not run.is_settled:
            return Resume()
        return None

    def intervene(self, event: OperatorEvent) -> None:
        """Between two steps, as an operator does, and looked at right away. Raises Violation."""
        most = _most(self.scheduler.pressure)
        self.scheduler.pressure.intervene(event)
        if isinstance(event, SetPressure):
            self.is_pressed = True
            _check_pressure(event, most, self.scheduler.memory)
        elif isinstance(event, ReleasePressure):
            self.is_pressed = False


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
    return "last chunk" if launched.requests[0].place is Place.DISPATCHED else "chunk"


def _check_pressure(asked: SetPressure, most: tuple[int, ...], memory: KVMemory) -> None:
    counts = asked.leave_pages, asked.leave_rows, asked.leave_unlocked, asked.leave_window_pages
    for count, limit, left in zip(counts, most, _left(memory), strict=True):
        if count is not None and left != min(count, limit):
            raise Violation(f"{count} of at most {limit} were to be left by {asked}, but {left} are")


def _most(pressure: Pressure) -> tuple[int, ...]:
    """Pages and rows that could be free, nodes that could be unlocked, window pages: by what requests own."""
    return (
        pressure.most_free_pages,
        pressure.most_free_rows,
        pressure.most_unlocked_nodes,
        pressure.most_free_window_pages,
    )


def _left(memory: KVMemory) -> tuple[int, ...]:
    """Pages and rows that are free, nodes that are unlocked, window pages that are free."""
    unlocked = sum(1 for node in memory.tree.nodes() if node.lock_ref == 0)
    window = 0 if memory.sliding_window is None else memory.sliding_window.pages.free
    return memory.pages.free, memory.rows.free, unlocked, window
