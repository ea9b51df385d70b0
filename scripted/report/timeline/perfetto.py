"""Exports a run as Chrome trace events, for ui.perfetto.dev or chrome://tracing.

The tracks: one for each stage, one for waiting results, one for events and replies, and counters of the queues. A step
lasts one millisecond, because steps, not seconds, order the events.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import msgspec

from scripted.core.phrases import printable
from scripted.report.step_log import ShownStep
from scripted.report.trace import Trace

STEP_US: Final = 1000
_PID: Final = 1
_SCHEDULER_TRACK: Final = 0
# Stage n is track n + 1; results and their slots come after the stages.
_FIRST_STAGE_TRACK: Final = 1

_Value = str | int | bool


class _Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One entry of the Chrome trace event format; times are in microseconds."""

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
    """Return Chrome trace event JSON, equal for equal traces. Each engine of a fleet is a process."""
    runs = [trace]
    if trace.fleet is not None:
        titled = [(one, f"{one.name}, {trace.header.title}") for one in trace.fleet.engines]
        runs = [Trace(msgspec.structs.replace(trace.header, title=title), one.log) for one, title in titled]
    events = [
        msgspec.structs.replace(event, pid=number) for number, run in enumerate(runs, _PID) for event in _events_of(run)
    ]
    return msgspec.json.encode(_File(events, "ms")).decode()


def _events_of(trace: Trace) -> Iterator[_Event]:
    yield from (*_names(trace), *_boxes(trace))
    for step in trace.log.steps:
        yield from (*_marks(step), _counters(step))


def _names(trace: Trace) -> Iterator[_Event]:
    tracks = ["scheduler", *(f"stage {stage}" for stage in range(trace.log.stages))]
    tracks += [f"result waits {slot}" for slot in range(trace.log.depth)]
    title = printable(f"{trace.header.title}: {trace.header.outcome}")
    yield _Event(ph="M", name="process_name", pid=_PID, tid=0, args={"name": title})
    for track, name in enumerate(tracks):
        yield _Event(ph="M", name="thread_name", pid=_PID, tid=track, args={"name": name})
        yield _Event(ph="M", name="thread_sort_index", pid=_PID, tid=track, args={"sort_index": track})


def _boxes(trace: Trace) -> Iterator[_Event]:
    launched = trace.log.launches()
    for step in trace.log.steps:
        pipeline = trace.log.pipeline_at(step, launched)
        for slot, batch in enumerate((*pipeline.stages, *pipeline.results)):
            if batch is not None:
                name = launched[batch].batch.text if batch in launched else f"#{batch}"
                yield _Event(ph="X", name=name, pid=_PID, tid=_FIRST_STAGE_TRACK + slot, ts=_time(step), dur=STEP_US)


def _marks(step: ShownStep) -> Iterator[_Event]:
    state: dict[str, _Value] = {"window": step.in_window, "digest": step.digest}
    yield _Event(
        ph="X", name=f"step {step.step}", pid=_PID, tid=_SCHEDULER_TRACK, ts=_time(step), dur=STEP_US, args=state
    )
    for said in (*step.arrived, *step.answered):
        yield _Event(ph="i", name=said.text, pid=_PID, tid=_SCHEDULER_TRACK, ts=_time(step), s="t")
    if step.failure is not None:
        name = f"{'DIED' if step.error else 'FAILED'}: {printable(step.failure)}"
        yield _Event(ph="i", name=name, pid=_PID, tid=_SCHEDULER_TRACK, ts=_time(step), s="g")


def _counters(step: ShownStep) -> _Event:
    sizes: dict[str, _Value] = {
        "waiting": len(step.waiting),
        "chunked": int(step.chunked is not None),
        "running": len(step.running),
        "in_flight": len(step.in_flight),
    }
    return _Event(ph="C", name="requests and microbatches", pid=_PID, tid=0, ts=_time(step), args=sizes)


def _time(step: ShownStep) -> int:
    return step.step * STEP_US
