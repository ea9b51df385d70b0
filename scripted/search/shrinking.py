"""Shrinking: reduces a failing schedule to the few events that matter, while the same invariant fails.

Tries the server's default settings first, then delta debugging over events, smaller numbers, earlier steps and plain
names, and runs every candidate. The result is one-minimal: no single one of these changes leads to a schedule that
fails in the same way.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import string
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import msgspec

from scripted.core.action import Action, rid_of
from scripted.core.mutant import switched_on
from scripted.core.placed_action import Placed
from scripted.core.protocol import ChecksAlike, ShrinksConfigs
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.execution import Failure, Outcome, execute, execute_recorded

SHRINK_BUDGET_S: Final = 5.0
_LETTERS: Final = string.ascii_lowercase
# How many hanging runs fit into the budget.
_HANGING_RUNS: Final = 10


class Shrunk(msgspec.Struct, frozen=True):
    """The smallest schedule found, with the runs and seconds that it took. ``fails``: the first run failed.

    ``is_minimal``: no single event can be dropped and no number reduced; False if the time ran out first.
    """

    schedule: Schedule
    runs: int
    seconds: float
    fails: bool
    is_minimal: bool


def shrink(
    schedule: Schedule,
    signature: str | None = None,
    *,
    budget_s: float = SHRINK_BUDGET_S,
    keeps: Callable[[Schedule], bool] = lambda _: True,
    slips: bool = False,
) -> Shrunk:
    """Shrink a failing schedule; return a passing one unchanged.

    ``signature`` is the signature of the failure that was found. It stays the goal even if a whole run fails in another
    way: a search skips some checks in some runs, and the failure may need them skipped. A smaller schedule must also
    satisfy ``keeps``. With ``slips`` it may fail in any way, which leads from every symptom of a cause to the simplest.
    """
    search = _Search(schedule, signature, budget_s, keeps)
    search.slips = slips
    if search.signature is not None:
        while search.improve():
            pass
    seconds = time.monotonic() - search.started
    return Shrunk(search.best, search.runs, seconds, search.signature is not None, not search.is_overdue)


def forms_of(small: Schedule, mutant: str | None = None, *, budget_s: float = SHRINK_BUDGET_S) -> Iterator[Schedule]:
    """Yield a shrunk schedule, and then the simplest schedule with the same bug, even if it breaks another promise.

    A script of the first may break another promise earlier, because a script leaves out actions without effect. No
    mutant may be on.
    """
    yield small
    with switched_on(small.adapter, mutant):
        slipped = shrink(small, budget_s=budget_s, slips=True)
    if slipped.fails and slipped.schedule != small:
        yield slipped.schedule


def way_to_fail(schedule: Schedule, signature: str | None) -> tuple[Callable[..., Outcome], Failure | None]:
    """Return the function that runs a schedule into the failure that was found, and that failure.

    Falls back on a whole run. Some runs of a search skip some checks, and only targets without additions are recorded
    and judged by their records, unless the adapter makes the same checks in every run.
    """
    ways: tuple[Callable[..., Outcome], ...] = (execute,)
    adapter = schedule.adapter
    if not (isinstance(adapter, ChecksAlike) and adapter.checks_alike):
        ways += functools.partial(execute, leave_out=True), execute_recorded
    failures = []
    for way in ways:
        failure = way(schedule).failure
        if failure is not None and signature in (None, failure.signature):
            return way, failure
        failures.append(failure)
    return ways[0], failures[0]


class _Search:
    """Holds the best schedule so far, and tries candidates."""

    def __init__(
        self, schedule: Schedule, signature: str | None, budget_s: float, keeps: Callable[[Schedule], bool]
    ) -> None:
        self.started = time.monotonic()
        # Process time: a process that was stopped or starved for a while keeps its whole budget.
        self._clock = time.process_time
        self._deadline = self._clock() + budget_s
        self.best = schedule
        self.runs = 1
        self._keeps = keeps
        self.slips = False
        self._tried: set[Schedule] = set()
        self._timeout_s: float | None = None
        self._execute, failure = way_to_fail(schedule, signature)
        self.signature = None if failure is None else failure.signature
        if failure is not None and failure.hangs:
            # The run hangs; smaller candidates get less time to show the hang.
            self._clock = time.monotonic
            self._timeout_s, self._deadline = budget_s / _HANGING_RUNS, self._clock() + budget_s

    @property
    def is_overdue(self) -> bool:
        return self._clock() >= self._deadline

    def improve(self) -> bool:
        """Try every kind of smaller schedule once; return whether one of them became the best."""
        before = self.best
        # A finding in settings that people use is worth more than one with few events.
        self._take_first_of(_fewer_settings)
        self._drop_events()
        for kind in (_earlier, _smaller_numbers, _fewer_settings, _plain_names):
            self._take_first_of(kind)
        return self.best != before and not self.is_overdue

    def _fails(self, candidate: Schedule) -> bool:
        if self.is_overdue or candidate in self._tried:
            return False
        self._tried.add(candidate)
        self.runs += 1
        try:
            failure = self._execute(candidate, timeout_s=self._timeout_s).failure
        except (ValueError, HarnessError, ScriptDefinitionError):
            return False  # these settings need one another
        if failure is None or not (self.slips or failure.signature == self.signature) or not self._keeps(candidate):
            return False
        self.best = candidate
        return True

    def _drop_events(self) -> None:
        """Drop halves first and single events last; after a success, continue with the rest."""
        size = max(1, len(self.best.placed) // 2)
        while size:
            index = 0
            while index < len(self.best.placed):
                placed = self.best.placed
                rest = placed[:index] + placed[index + size :]
                if not self._fails(self.best.of_placed(rest)):
                    index += size
            size //= 2

    def _take_first_of(self, candidates: Callable[[Schedule], Iterator[Schedule]]) -> None:
        """Take one failing candidate of this kind after another, until none fails."""
        while any(self._fails(candidate) for candidate in candidates(self.best)):
            pass


def _earlier(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules in which an event moves to an earlier step, with all later events or alone."""
    placed = schedule.placed
    for index, one in enumerate(placed):
        gap = one.step - (placed[index - 1].step if index else 1)
        for less in sorted({gap, gap // 2, min(gap, 1)} - {0}, reverse=True):
            moved = tuple(Placed(later.step - less, later.action) for later in placed[index:])
            yield schedule.of_placed(placed[:index] + moved)
        for step in dict.fromkeys((one.step - one.step // 2, one.step - 1)):
            if 0 < step < one.step:
                others = schedule.of_placed(placed[:index] + placed[index + 1 :])
                yield others.with_placed([Placed(step, one.action)])


def _smaller_numbers(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules with a smaller action, or with a whole number halved or lower by one, down to one."""
    for index, one in enumerate(schedule.placed):
        for action in itertools.chain(one.action.smaller(), _lower_numbers(one.action)):
            placed = (*schedule.placed[:index], Placed(one.step, action), *schedule.placed[index + 1 :])
            yield schedule.of_placed(placed)


def _lower_numbers(action: Action) -> Iterator[Action]:
    values = msgspec.structs.asdict(action)
    for field in msgspec.structs.fields(action):
        value = values[field.name]
        if type(value) is int and value > 1 and value != field.default:
            for less in dict.fromkeys((value // 2, value - 1)):
                with contextlib.suppress(ValueError, ScriptDefinitionError):  # the action refuses some numbers
                    yield msgspec.structs.replace(action, **{field.name: less})


def _fewer_settings(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules with one setting at its default, or nearer to it."""
    adapter = schedule.adapter
    if not isinstance(adapter, ShrinksConfigs):
        return iter(())
    return map(schedule.with_config, adapter.smaller_configs(schedule.config))


def _plain_names(schedule: Schedule) -> Iterator[Schedule]:
    """Yield schedules whose requests are called a, b, c by first mention: all of them, or one."""
    rids = dict.fromkeys(rid for one in schedule.placed if (rid := rid_of(one.action)) is not None)
    if len(rids) > len(_LETTERS):
        return
    plain = dict(zip(rids, _LETTERS, strict=False))
    strange = {rid: name for rid, name in plain.items() if rid != name}
    if strange:
        yield _renamed(schedule, plain)
    for rid, name in strange.items():
        if name not in rids:
            yield _renamed(schedule, {rid: name})


def _renamed(schedule: Schedule, names: Mapping[str, str]) -> Schedule:
    return schedule.of_placed(Placed(one.step, one.action.renamed(names)) for one in schedule.placed)
