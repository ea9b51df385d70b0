"""Presents a replayed flight: its steps in words, its verdict, and the steps that become a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from scripted.report.rerun import Rerun
from scripted.report.step_log import log_of_adapter
from scripted.sdk.flight.reader import Flight
from scripted.sdk.flight.replay import FlightOutcome
from scripted.sdk.messages import Record, Step


def steps_of(outcome: FlightOutcome) -> Sequence[Record]:
    """Return the replayed steps. Requests at a ring's beginning arrive in the first, with their earlier output."""
    if not outcome.opening or not outcome.records:
        return outcome.records
    first, *rest = outcome.records
    step = Step((*outcome.opening, *first.step.events), first.step.now)
    return [msgspec.structs.replace(first, step=step), *rest]


def rerun_of(adapter: Any, flight: Flight, outcome: FlightOutcome) -> Rerun:
    """Return the report of ``scripted replay`` on a flight."""
    config = adapter.read_config(flight.header.words)
    found = outcome.differs
    differs = None
    if found is not None:
        differs = f"step {found.plan}: {found.text}; probably not recorded: {found.likely}"
    end = flight.end
    recorded = end.error if end is not None and end.error else None
    times = [record.step.now for record in outcome.records]
    return Rerun(
        log_of_adapter(adapter, steps_of(outcome), config),
        outcome.error,
        differs,
        recorded,
        times[-1] - times[0] if times else None,
        1 if flight.start is None else flight.start.plan,
        outcome.breaks if outcome.error is None else outcome.broken,
        adapter=adapter.name,
        config=dict(adapter.config_words(config)),
        notes=_notes(flight),
    )


def _notes(flight: Flight) -> tuple[str, ...]:
    """Return notes about the file for the reader of a replay."""
    notes = list(flight.header.notes)
    if flight.start is not None:
        notes += [f"the ring begins with step {flight.start.plan}; it has lost {one}" for one in flight.start.lost]
    return (*notes, flight.damage) if flight.damage else tuple(notes)
