"""The steps of a fleet: what each engine did in one, and all of them in one table."""

from __future__ import annotations

from typing import Any

import msgspec

from scripted.report.step_log import Said, ShownBatch, ShownStep


class FleetStep(msgspec.Struct, frozen=True):
    events: tuple[Any, ...]
    now: float


class FleetRecord(msgspec.Struct, frozen=True):
    last: dict[str, Any]
    shown: dict[str, ShownStep]
    error: str | None


def merged(number: int, record: FleetRecord) -> ShownStep:
    """One step of all engines as one row."""
    arrived, answered, launched = [], [], []
    for name, step in record.shown.items():
        arrived += [Said(text=f"{name}: {said.in_full}", kind=said.kind) for said in step.arrived]
        answered += [Said(text=f"{name}: {said.in_full}", kind=said.kind) for said in step.answered]
        launched += [] if step.launched is None else [f"{name}: {step.launched.in_full}"]
    batch = ShownBatch(id=number, kind="steps", order="; ".join(launched)) if launched else None
    now = max([step.now for step in record.shown.values()], default=0.0)
    return ShownStep(
        step=number, now=now, arrived=tuple(arrived), launched=batch, answered=tuple(answered), error=record.error
    )
