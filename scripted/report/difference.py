"""The first difference between two runs: the step, the field, and the value in each.

Owns the comparison, step by step from each run's own start. Time, digest and call ids are left out where two runs need
not be the same one: they differ between runs that do the same, or only repeat a difference.
"""

from __future__ import annotations

from typing import Final

import msgspec

from scripted.core.phrases import printable
from scripted.report.step_log import Said, ShownBatch, ShownStep, StepLog

_FIELDS: Final = ShownStep.__struct_fields__
_OF_ONE_RUN: Final = ("step", "now", "digest")


class Difference(msgspec.Struct, frozen=True):
    """``index`` counts steps from the start of the runs; ``left`` and ``right`` say in words what each run had."""

    index: int
    field: str
    left: str
    right: str


def first_difference(left: StepLog, right: StepLog, *, exactly: bool = False) -> Difference | None:
    """Where two runs first differ; None when they are the same. ``exactly`` compares time and digests too."""
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
