"""Describes the full state of one step, for the pane that shows the step under the pointer.

Owns the pane's wording. Nothing is shortened here, so the pane has everything that the timeline leaves out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from scripted.core.phrases import plural, printable
from scripted.report.step_log import Launch, ShownBatch, ShownStep, StepLog


class StepView(msgspec.Struct, frozen=True):
    """The lines about one step, by heading. ``flags`` are some of 'window', 'failed' and 'differs'."""

    x: int
    step: int
    headline: str
    flags: tuple[str, ...]
    sections: dict[str, tuple[str, ...]]


def state_of(
    step: ShownStep,
    log: StepLog,
    launched: dict[int, Launch],
    *,
    x: int,
    notes: Sequence[str],
    differs: bool,
    before: Sequence[str] = (),
) -> StepView:
    """Describe one step. ``launched`` covers the whole run, ``notes`` this step; ``before`` has earlier events."""
    flags = {"failed": bool(step.failure), "window": step.in_window, "differs": differs}
    sections = {
        "failed": (printable(step.failure),) if step.failure else (),
        "before": tuple(before),
        "notes": tuple(map(printable, notes)),
        "arrived": tuple(said.in_full for said in step.arrived),
        "launched": tuple(_launched(step.launched)),
        "in flight": tuple(_in_flight(step, log, launched)),
        "queues": _queues(step),
        "answered": tuple(said.in_full for said in step.answered),
        "memory": (", ".join(f"{count} {name.replace('_', ' ')}" for name, count in step.memory.items()),),
        "digest": (printable(step.digest),),
    }
    return StepView(
        x,
        step.step,
        _headline(step),
        tuple(name for name, is_set in flags.items() if is_set),
        {title: lines for title, lines in sections.items() if lines},
    )


def _headline(step: ShownStep) -> str:
    if step.error:
        return "the scheduler died in this step"
    if step.broken:
        return "the run failed after this step"
    if step.in_window:
        return f"the window: every queue is empty, {plural(len(step.in_flight), 'microbatch')} in flight"
    return "" if step.in_flight or step.transferring or not step.queues_are_clear else "idle"


def _launched(batch: ShownBatch | None) -> Iterator[str]:
    if batch is not None and batch.shares:
        yield f"#{batch.id} {batch.kind}, {plural(batch.tokens, 'token')}"
        yield from (share.detail for share in batch.shares)
    elif batch is not None:
        yield batch.text


def _in_flight(step: ShownStep, log: StepLog, launched: dict[int, Launch]) -> Iterator[str]:
    pipeline = log.pipeline_at(step, launched)
    for batch in pipeline.results:
        yield f"result of {_named(batch, launched)} waits"
    for stage, in_stage in reversed(list(enumerate(pipeline.stages))):
        if in_stage is not None:
            yield f"stage {stage}: {_named(in_stage, launched)}"


def _named(batch: int, launched: dict[int, Launch]) -> str:
    if batch not in launched:
        return f"#{batch}, launched before the first step of this trace"
    shown, step = launched[batch]
    what = f"{shown.kind} of {' '.join(map(printable, shown.rids))}" if shown.rids else shown.order
    return f"#{batch} {what}, launched in step {step}"


def _queues(step: ShownStep) -> tuple[str, ...]:
    transferring = (f"transferring: {_members(step.transferring)}",) if step.transferring else ()
    if step.queues_are_clear:
        return ("waiting, chunked and running are empty", *transferring)
    chunked = "nothing" if step.chunked is None else printable(step.chunked)
    queues = f"waiting: {_members(step.waiting)}", f"chunked: {chunked}", f"running: {_members(step.running)}"
    return *queues, *transferring


def _members(rids: Sequence[str]) -> str:
    return f"{len(rids)} ({' '.join(map(printable, rids))})" if rids else "nothing"
