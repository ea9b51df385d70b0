"""A run as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

Owns the export alone: one track a stage, one for results that wait, one for what arrives and is answered, counters for
the queues. A step is drawn as one millisecond, because steps, not seconds, order what happens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from engine.scheduler.ports import StepRecord
from scripted.core.phrases import printable
from scripted.report.timeline.positions import in_window, launches, pipeline_at
from scripted.report.trace import Trace
from scripted.report.wording import call_names, event_text, microbatch_text, reply_text

__all__ = ["STEP_US", "to_perfetto"]

STEP_US: Final = 1000
_PID: Final = 1
_SCHEDULER_TRACK: Final = 0
# Stage n is track n + 1; results and their slots come after the stages.
_FIRST_STAGE_TRACK: Final = 1

_Value = str | int | bool


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the Chrome trace event format; times in microseconds."""

    ph: str
    name: str
    pid: int
    tid: int
    ts: int | None = None
    dur: int | None = None
    s: str | None = None
    args: dict[str, _Value] = {}


class _File(msgspec.Struct, frozen=True):
    traceEvents: list[_Event]  # noqa: N815 - the format's own name
    displayTimeUnit: str  # noqa: N815 - the format's own name


def to_perfetto(trace: Trace) -> str:
    """Chrome trace event JSON. The same trace gives the same text."""
    events = [*_names(trace), *_boxes(trace)]
    calls = call_names(trace.records)
    for record in trace.records:
        events += _marks(record, calls)
        events.append(_counters(record))
    return msgspec.json.encode(_File(events, "ms")).decode()


def _names(trace: Trace) -> Iterator[_Event]:
    stages = trace.header.limits.pp_size
    tracks = ["scheduler", *(f"stage {stage}" for stage in range(stages))]
    tracks += [f"result waits {slot}" for slot in range(trace.header.limits.depth)]
    title = printable(f"{trace.header.title}: {trace.header.outcome}")
    yield _Event(ph="M", name="process_name", pid=_PID, tid=0, args={"name": title})
    for track, name in enumerate(tracks):
        yield _Event(ph="M", name="thread_name", pid=_PID, tid=track, args={"name": name})
        yield _Event(ph="M", name="thread_sort_index", pid=_PID, tid=track, args={"sort_index": track})


def _boxes(trace: Trace) -> Iterator[_Event]:
    stages, launched = trace.header.limits.pp_size, launches(trace.records)
    for record in trace.records:
        pipeline = pipeline_at(record, launched, stages)
        for slot, microbatch_id in enumerate((*pipeline.stages, *pipeline.results)):
            if microbatch_id is not None:
                launch = launched.get(microbatch_id)
                name = microbatch_text(launch.microbatch) if launch else f"#{microbatch_id}"
                yield _Event(ph="X", name=name, pid=_PID, tid=_FIRST_STAGE_TRACK + slot, ts=_time(record), dur=STEP_US)


def _marks(record: StepRecord, calls: dict[str, str]) -> Iterator[_Event]:
    words = [event_text(event) for event in record.events] + [reply_text(reply, calls) for reply in record.replies]
    state: dict[str, _Value] = {"window": in_window(record), "digest": record.digest}
    yield _Event(
        ph="X", name=f"step {record.step}", pid=_PID, tid=_SCHEDULER_TRACK, ts=_time(record), dur=STEP_US, args=state
    )
    for text in words:
        yield _Event(ph="i", name=text, pid=_PID, tid=_SCHEDULER_TRACK, ts=_time(record), s="t")
    if record.error is not None:
        name = f"DIED: {printable(record.error)}"
        yield _Event(ph="i", name=name, pid=_PID, tid=_SCHEDULER_TRACK, ts=_time(record), s="g")


def _counters(record: StepRecord) -> _Event:
    sizes: dict[str, _Value] = {
        "waiting": record.waiting,
        "chunked": int(record.chunked is not None),
        "running": record.running,
        "in_flight": len(record.in_flight),
    }
    return _Event(ph="C", name="requests and microbatches", pid=_PID, tid=0, ts=_time(record), args=sizes)


def _time(record: StepRecord) -> int:
    return record.step * STEP_US
