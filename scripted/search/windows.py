"""Cuts a long failing schedule to its window: first by time, then by request. Shrinking drops single events.

A server's recording has thousands of events and runs for seconds, so whole spans of requests are dropped first.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Final

import msgspec

from scripted.core.action import rid_of
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.placed_action import Placed
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.shrinking import way_to_fail

_BUDGET_S: Final = 60.0
# A schedule with fewer events goes straight to shrinking.
_LONG_EVENTS: Final = 24


def cut_to_window(schedule: Schedule) -> Schedule:
    """Return the window of a failing schedule that fails in the same way; return a passing schedule unchanged."""
    if len(schedule.placed) < _LONG_EVENTS:
        return schedule
    way, failure = way_to_fail(schedule, None)
    if failure is None:
        return schedule

    def fails(candidate: Schedule) -> bool:
        try:
            found = way(candidate).failure
        except (ValueError, HarnessError, ScriptDefinitionError):
            return False
        return found is not None and found.signature == failure.signature

    window = _Window(schedule, fails, time.process_time() + _BUDGET_S)
    window.end_at(way(schedule).steps)
    window.try_(_without(schedule, (HoldResults, ReleaseResults)))
    window.try_(_without(window.best, (AdvanceClock,)))
    window.drop_the_oldest()
    window.drop_requests()
    return window.best


class _Window:
    """Holds the best schedule so far, within a time budget."""

    def __init__(self, schedule: Schedule, fails: Callable[[Schedule], bool], deadline: float) -> None:
        self.best = schedule
        self._fails = fails
        self._deadline = deadline

    def try_(self, candidate: Schedule) -> bool:
        """Take a shorter candidate if it fails in the same way."""
        if len(candidate.placed) >= len(self.best.placed) or time.process_time() > self._deadline:
            return False
        if self._fails(candidate):
            self.best = candidate
            return True
        return False

    def end_at(self, step: int) -> None:
        """Drop the events after the failure."""
        self.try_(self.best.of_placed([one for one in self.best.placed if one.step <= step]))

    def drop_the_oldest(self) -> None:
        """Drop the earliest requests, as many at once as possible."""
        rids = _requests(self.best)
        dropped, size = 0, len(rids) // 2
        while size:
            if self.try_(_later(self.best, rids[: dropped + size])):
                dropped += size
            else:
                size //= 2

    def drop_requests(self) -> None:
        """Drop spans of the remaining requests, from long ones to single ones."""
        size = len(_requests(self.best)) // 2
        while size:
            rids = _requests(self.best)
            for first in range(0, len(rids), size):
                self.try_(_later(self.best, rids[first : first + size]))
            size //= 2


def _requests(schedule: Schedule) -> list[str]:
    """Return the requests in the order of their first actions."""
    rids = [rid_of(one.action) for one in schedule.placed]
    return list(dict.fromkeys([rid for rid in rids if rid is not None]))


def _later(schedule: Schedule, rids: Collection[str]) -> Schedule:
    """Return the schedule without these requests, shifted to its new first step."""
    placed = [one for one in schedule.placed if rid_of(one.action) not in rids]
    first = min([one.step for one in placed if rid_of(one.action) is not None], default=1)
    moved = [Placed(max(1, one.step - first + 1), one.action) for one in placed]
    return schedule.of_placed(moved)


def _without(schedule: Schedule, kinds: tuple[type[msgspec.Struct], ...]) -> Schedule:
    return schedule.of_placed([one for one in schedule.placed if not isinstance(one.action, kinds)])
