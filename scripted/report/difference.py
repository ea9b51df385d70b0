"""Finds the first difference between two runs: the step, the field, and the value in each.

Compares step by step from each run's own start. Step numbers, times and digests are compared only on request: they
differ between runs that do the same, or repeat an earlier difference.
"""

from __future__ import annotations

from typing import Final

import msgspec

from scripted.core.phrases import printable
from scripted.report.step_log import Said, ShownBatch, ShownStep, StepLog

_FIELDS: Final = ShownStep.__struct_fields__
_OF_ONE_RUN: Final = ("step", "now", "digest")


class Difference(msgspec.Struct, frozen=True):
    """A difference in step ``index``, counted from the start; ``left`` and ``right`` are the two runs' values."""

    index: int
    field: str
    left: str
    right: str


def first_difference(left: StepLog, right: StepLog, *, exactly: bool = False) -> Difference | None:
    """Return the first difference; None for equal runs. ``exactly`` also compares step numbers, times and digests."""
    fields = [name for name in _FIELDS if exactly or name not in _OF_ONE_RUN]
    for index, (a, b) in enumerate(zip(left.steps, right.steps, strict=False)):
        of_one, of_other = msgspec.structs.asdict(a), msgspec.structs.asdict(b)
        for field in fields:
            one, other = of_one[field], of_other[field]
            if one != other:
                return Difference(index, field, _words(one), _words(other))
    if len(left.steps) == len(right.steps):
        return None
    end = min(len(left.steps), len(right.steps))
    return Difference(end, "length", _length(left, end), _length(right, end))


def _words(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} {name}" for name, number in value.items())
    if isinstance(value, tuple):
        return "; ".join(map(_words, value)) or "nothing"
    if isinstance(value, Said | ShownBatch):
        return value.text
    return "nothing" if value is None else f"#{value}" if isinstance(value, int) else printable(str(value))


def _length(log: StepLog, end: int) -> str:
    return "goes on" if len(log.steps) > end else "ends"
