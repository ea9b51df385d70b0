"""Bounded claims: a few events, placed at every step up to a bound and in every order, visiting no state twice.

Walks the tree of all placements step by step. Once a run repeats the whole state, the step and the remaining events of
an earlier run, its outcome is known, and the walk only counts its schedules.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import msgspec

from scripted.core.action import Action
from scripted.core.common_actions import AdvanceClock
from scripted.core.errors import Overdue
from scripted.core.placed_action import Placed
from scripted.core.protocol import CopiesRuns, Freezer
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.script.watchdog import watchdog
from scripted.search.execution import OVERDUE, RUN_TIMEOUT_S, Failure, Left, finish

DEFAULT_DEPTH = 6
DEFAULT_TOGETHER = 2
_COPIES = "a bounded claim needs runs that can be copied"

# The state of a run and its remaining actions.
_Key = tuple[tuple[bytes | None, ...], tuple[Action, ...]]


class Bounded(msgspec.Struct, frozen=True):
    """The coverage of a bounded search: ``schedules`` placements through ``states`` distinct states.

    ``merged`` counts steps into a known state. ``failure`` is the failure of ``schedule``, the first one that breaks a
    promise. The search stops there, or when its time is up; ``complete`` is then false.
    """

    schedules: int
    states: int
    merged: int
    seconds: float
    complete: bool
    schedule: Schedule | None = None
    failure: Failure | None = None

    def __str__(self) -> str:
        said = f"{self.schedules:,} schedules, {self.states:,} states, {self.merged:,} steps into a known one"
        if self.failure is not None:
            return f"{said}; one breaks a promise: {self.failure}"
        return f"{said}; none breaks a promise" if self.complete else f"{said}; stopped before the end, no claim"


def check_all_orders(
    events: Schedule, *, depth: int = DEFAULT_DEPTH, together: int = DEFAULT_TOGETHER, seconds: float | None = None
) -> Bounded:
    """Place each action of ``events``, ignoring its own step, at any of the first ``depth`` steps, or nowhere.

    At most ``together`` actions share a step, in every order. Raises ScriptDefinitionError if the scheduler's runs
    cannot be copied, UnreadableState if its states cannot be read.
    """
    if depth < 1 or together < 1 or not events.placed:
        raise ScriptDefinitionError(
            f"a bounded claim needs actions, and depth and together of at least 1, got {str(events)!r}, "
            f"{depth} and {together}"
        )
    return _Tree(events, depth, together, seconds).run()


class _TreeEnded(Exception):
    """Raised at a failure or when the time is up."""


class _Tree:
    def __init__(self, events: Schedule, depth: int, together: int, seconds: float | None) -> None:
        self._base = events
        adapter = events.adapter
        if not isinstance(adapter, CopiesRuns):
            raise ScriptDefinitionError(f"{_COPIES}; give the adapter {events.of} freeze() and digests()")
        self._copies_runs: CopiesRuns = adapter
        self._depth = depth
        self._together = together
        self._began = time.monotonic()
        self._until = None if seconds is None else self._began + seconds
        # The number of schedules through each state.
        self._known: dict[_Key, int] = {}
        self._merged = 0
        self._broken: tuple[Schedule, Failure] | None = None

    def run(self) -> Bounded:
        actions = tuple([placed.action for placed in self._base.placed])
        gate = Run(self._schedule(()))
        schedules, complete = 0, True
        try:
            schedules = self._below(self._frozen(gate), actions, ())
        except _TreeEnded:
            complete = False
        except Overdue as exc:
            raise ScriptDefinitionError(f"{_COPIES}, and to copy one {exc}") from exc
        spent = time.monotonic() - self._began
        schedule, failure = self._broken or (None, None)
        return Bounded(schedules, len(self._known), self._merged, spent, complete, schedule, failure)

    def _schedule(self, placed: tuple[Placed, ...]) -> Schedule:
        """Return the schedule of a path. An empty advance of the clock keeps it from settling before the last step."""
        return self._base.of_placed((*placed, Placed(self._depth, AdvanceClock(seconds=0.0))))

    def _frozen(self, gate: Run) -> Freezer:
        with watchdog(RUN_TIMEOUT_S, OVERDUE, is_busy=True):
            frozen = self._copies_runs.freeze(gate)
        if frozen is None:
            raise ScriptDefinitionError(f"{_COPIES}; give the adapter {self._base.of} a copier")
        return frozen

    def _below(self, frozen: Freezer, left: tuple[Action, ...], path: tuple[Placed, ...]) -> int:
        """Run and count the schedules that start with ``path``. ``frozen`` is the run before the next step."""
        schedules = 0
        for chosen, rest in _choices(left, self._together):
            if self._until is not None and time.monotonic() >= self._until:
                raise _TreeEnded
            with watchdog(RUN_TIMEOUT_S, OVERDUE, is_busy=True):
                gate = frozen.thaw("")
            assert isinstance(gate, Run)
            step = gate.step + 1
            placed = (*path, *(Placed(step, action) for action in chosen))
            schedules += self._after(gate, step, placed, rest)
        return schedules

    def _after(self, gate: Run, step: int, placed: tuple[Placed, ...], rest: tuple[Action, ...]) -> int:
        """Run one step: to a known state, to a new one, or to the end."""
        key: _Key | None = None
        schedule = self._schedule(placed)

        def look(run: Run) -> None:
            nonlocal key
            if run.step < step:
                return
            run.watch = None
            key = tuple(self._copies_runs.digests(run)), rest
            if key in self._known or step < self._depth:
                raise Left

        gate.follow(schedule)
        gate.watch = look
        try:
            outcome = finish(gate)
        except Left:
            assert key is not None, "a run is left after its state was read"
            if key in self._known:
                self._merged += 1
                return self._known[key]
            self._known[key] = schedules = self._below(self._frozen(gate), rest, placed)
            return schedules
        if outcome.failure is not None:
            self._broken = schedule, outcome.failure
            raise _TreeEnded
        if key is not None:
            self._known[key] = 1
        return 1


def _choices(left: tuple[Action, ...], most: int) -> Iterator[tuple[tuple[Action, ...], tuple[Action, ...]]]:
    """Yield each ordered choice of actions for one step, with the remaining actions; skip duplicates."""
    seen = set()
    for count in range(min(most, len(left)) + 1):
        for numbers in itertools.permutations(range(len(left)), count):
            chosen = tuple([left[number] for number in numbers])
            if chosen not in seen:
                seen.add(chosen)
                yield chosen, tuple([action for number, action in enumerate(left) if number not in numbers])
