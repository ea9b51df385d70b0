"""Flights of the example scheduler, for the tests of this folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripted.core.adapters import adapter_named
from scripted.core.schedule import Schedule
from scripted.sdk.flight.of_machine import RecordedMachine, header_of
from scripted.sdk.flight.recorder import FlightRecorder, Options
from scripted.search.execution import record

EXAMPLE = "examples/your_scheduler/adapter.py"
FIXED = "examples/your_scheduler/fixed.py"
BUSY = (
    "blocks=9; 1 start a prompt=20 new=4; 2 start b prompt=20 shared=12 tail=3 new=3; 4 abort a; 9 flush; "
    "12 start c prompt=20 new=2; 13 start d prompt=6 new=8; 13 start e prompt=6 seed=1 new=8"
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new_recorder(
    folder: Path,
    snapshot: Any,
    *,
    adapter: str = FIXED,
    config: Mapping[str, Any] | None = None,
    clock: Any = None,
    **options: Any,
) -> FlightRecorder:
    return FlightRecorder(
        header_of(adapter, config or {}), folder, Options(**options), snapshot, clock=clock or Clock()
    )


def flown(
    folder: Path, line: str = BUSY, *, adapter: str = FIXED, why: str = "call", error: str = "", **options: Any
) -> Path:
    """The flight of a schedule that runs on a machine which is recorded."""
    schedule = Schedule.parse(f"adapter={adapter} {line}")
    known: Any = adapter_named(adapter)
    words = dict(known.config_words(schedule.config))
    machine = RecordedMachine(
        known.new_parts(schedule.config, record=True)[0],
        lambda snapshot: new_recorder(folder, snapshot, adapter=adapter, config=words, **options),
    )
    for one in record(schedule)[1]:
        machine.step(one.step.events, one.step.now)
    path = machine.recorder.leave(why, error)
    machine.recorder.close()
    assert path is not None
    return path
