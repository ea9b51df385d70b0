"""What each row of an adapter's table of known defects says: its schedules fail, and its fix takes that away."""

from __future__ import annotations

from pathlib import Path

from scripted.core.defects import Defect, defects_of, is_of
from scripted.core.schedule import Schedule
from scripted.search.execution import Failure
from scripted.search.shrinking import way_to_fail

_NO_PROJECT = Path("no project")


def rows_of(adapter: str, version: str) -> list[Defect]:
    """Return the defects that this version of the engine has, according to the adapter's table."""
    return [one for one in defects_of(adapter, _NO_PROJECT) if version.partition("+")[0] in one.versions]


def unlike(defect: Defect, adapter: str) -> list[str]:
    """Return the schedules that are not as the row says, each with what is wrong.

    A fix must fit. The schedule of a row that was found by reading may show a way that breaks no promise.
    """
    schedules = {text: Schedule.parse(text) for text in defect.schedules if is_of(text, adapter)}
    passing = [text for text, schedule in schedules.items() if _failure(schedule) is None]
    wrong = [f"passes: {text}" for text in passing if defect.found == "search"]
    if defect.fix:
        with defect.fixed():
            after = {text: _failure(schedule) for text, schedule in schedules.items()}
        wrong += [f"fails with the fix: {text}: {failure}" for text, failure in after.items() if failure is not None]
    return wrong


def _failure(schedule: Schedule) -> Failure | None:
    """Run a schedule in each way in which a search does; some promises are checked in one of them alone."""
    return way_to_fail(schedule, None)[1]
