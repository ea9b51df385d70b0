"""Where every microbatch is at every step, worked out from the records of a run.

A microbatch launched at step n is in stage 0 at step n, in stage 1 at n + 1 and so on; after the last stage its result
waits until a step takes it. Shared by the step table and the timeline.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from engine.plan import Microbatch
from engine.scheduler.ports import StepRecord

__all__ = ["InFlight", "Launch", "controls_of", "in_window", "launches", "pipeline_at", "queues_are_clear"]


class InFlight(msgspec.Struct, frozen=True):
    """What is in flight after one step: the microbatch id in each stage, if any, and the ids whose results wait."""

    stages: tuple[int | None, ...]
    results: tuple[int, ...]


class Launch(msgspec.Struct, frozen=True):
    """A microbatch and the step that launched it."""

    microbatch: Microbatch
    step: int


def launches(records: Iterable[StepRecord]) -> dict[int, Launch]:
    """Every launch in the records, by microbatch id."""
    return {r.microbatch.id: Launch(r.microbatch, r.step) for r in records if r.microbatch is not None}


def controls_of(launched: Mapping[int, Launch]) -> frozenset[int]:
    """The control microbatches: they carry a call to the stages and no requests."""
    return frozenset(number for number, launch in launched.items() if launch.microbatch.is_control)


def pipeline_at(record: StepRecord, launched: Mapping[int, Launch], stages: int) -> InFlight:
    """The pipeline as one step left it. A launch from before the first record is taken to be through all stages."""
    where: list[int | None] = [None] * stages
    results: list[int] = []
    for microbatch_id in record.in_flight:
        launch = launched.get(microbatch_id)
        age = stages if launch is None else record.step - launch.step
        if 0 <= age < stages:
            where[age] = microbatch_id
        else:
            results.append(microbatch_id)
    return InFlight(tuple(where), tuple(results))


def queues_are_clear(record: StepRecord) -> bool:
    """No request waits, is partly prefilled or runs."""
    return not record.waiting and record.chunked is None and not record.running


def in_window(record: StepRecord) -> bool:
    """The window of the flush race: every queue is clear, yet something is in flight."""
    return bool(record.in_flight) and queues_are_clear(record)
