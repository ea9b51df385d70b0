"""The first difference between two runs: the step, the field, and the value in each.

Owns the comparison, step by step from each run's own start. Time, digest and call ids are not compared: they differ
between runs that do the same, or only repeat a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

import msgspec

from engine.scheduler.ports import StepRecord
from scripted.core.phrases import printable
from scripted.report.trace import Trace
from scripted.report.wording import call_names, event_text, microbatch_text, reply_text

__all__ = ["Difference", "first_difference"]

_FIELDS: Final = (
    "events",
    "microbatch",
    "replies",
    "error",
    "waiting",
    "chunked",
    "running",
    "in_flight",
    "pages_free",
    "pages_cached",
    "pages_held",
)


class Difference(msgspec.Struct, frozen=True):
    """``index`` counts records from the start of the runs; ``left`` and ``right`` say in words what each run had."""

    index: int
    field: str
    left: str
    right: str


def first_difference(left: Trace, right: Trace) -> Difference | None:
    """Where two runs first differ; None when they are the same."""
    for index, (a, b) in enumerate(zip(left.records, right.records, strict=False)):
        for field in _FIELDS:
            if _comparable(a, field) != _comparable(b, field):
                return Difference(index, field, _words(left, a, field), _words(right, b, field))
    if len(left.records) == len(right.records):
        return None
    end = min(len(left.records), len(right.records))
    return Difference(end, "length", _length(left, end), _length(right, end))


def _comparable(record: StepRecord, field: str) -> object:
    value = getattr(record, field)
    return [_without_call_id(item) for item in value] if field in {"events", "replies"} else value


def _without_call_id(message: msgspec.Struct) -> msgspec.Struct:
    return msgspec.structs.replace(message, call_id="") if getattr(message, "call_id", None) else message


def _words(trace: Trace, record: StepRecord, field: str) -> str:
    value = getattr(record, field)
    words: dict[str, Callable[[], Iterable[str]]] = {
        "events": lambda: map(event_text, record.events),
        "replies": lambda: [reply_text(reply, call_names(trace.records)) for reply in record.replies],
        "microbatch": lambda: [microbatch_text(record.microbatch)] if record.microbatch else [],
        "in_flight": lambda: [f"#{microbatch_id}" for microbatch_id in record.in_flight],
    }
    if field in words:
        return "; ".join(words[field]()) or "nothing"
    return "nothing" if value is None else printable(str(value))


def _length(trace: Trace, end: int) -> str:
    return "goes on" if len(trace.records) > end else "ends"
