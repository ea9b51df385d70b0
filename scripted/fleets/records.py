"""The steps of a fleet: what each machine did in one, and all of them in one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from scripted.report.step_log import Said, ShownBatch, ShownStep


class FleetStep(msgspec.Struct, frozen=True):
    events: tuple[Any, ...]
    now: float


class FleetRecord(msgspec.Struct, frozen=True):
    """``last`` has the records of the machines that took a step."""

    now: float
    last: dict[str, Any]
    error: str | None


def merged(number: int, record: FleetRecord, shown: Mapping[str, ShownStep]) -> ShownStep:
    """One step of all machines as one row: each word names its own."""
    arrived: list[Said] = []
    answered: list[Said] = []
    launched: list[str] = []
    for name, step in shown.items():
        arrived += _named(name, step.arrived)
        answered += _named(name, step.answered)
        launched += [] if step.launched is None else [f"{name}: {step.launched.in_full}"]
    batch = ShownBatch(id=number, kind="steps", order="; ".join(launched)) if launched else None
    return ShownStep(
        step=number,
        now=record.now,
        arrived=tuple(arrived),
        launched=batch,
        answered=tuple(answered),
        error=record.error,
    )


def _named(name: str, said: Sequence[Said]) -> list[Said]:
    return [Said(text=f"{name}: {one.in_full}", kind=one.kind) for one in said]
