"""What a server writes down of its own steps: a whole recording, a flight record of the last ones, both or none.

Wraps the gate where the settings ask for it; a server that records nothing runs its gate bare.
"""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from engine.errors import ConfigError
from engine.recording import FlightRecorder, Header, RecordingFile, RecordingGate, Redactor, Sink
from engine.scheduler.ports import Gate, Step, StepResult
from engine.scheduler.scheduler import Scheduler
from engine.settings import ServerSettings

__all__ = ["flight_path", "recorded"]


def recorded(gate: Gate, scheduler: Scheduler, settings: ServerSettings) -> Gate:
    """The gate, recorded as the settings ask. Raises ConfigError for a place that cannot be written."""
    if not (settings.record or settings.flight_dir):
        return gate
    redactor = Redactor() if settings.record_redacted else None
    if settings.flight_dir:
        _require_writable(settings.flight_dir)
    sinks: list[Sink] = []
    if settings.record:
        sinks.append(_open(settings.record))
    if not settings.flight_dir:
        return RecordingGate(gate, scheduler, sinks, redactor=redactor)
    flight = FlightRecorder(Header(limits=scheduler.limits, redacted=redactor is not None))
    inner = RecordingGate(gate, scheduler, [*sinks, flight], redactor=redactor)
    return _FlightGate(inner, flight, flight_path(settings.flight_dir, os.getpid()))


def flight_path(folder: str, pid: int) -> Path:
    """Where the scheduler process ``pid`` leaves its flight record."""
    return Path(folder) / f"flight-{pid}.rec"


class _FlightGate:
    """Dumps the flight record when the loop dies, and whenever the process gets SIGUSR2."""

    def __init__(self, inner: Gate, flight: FlightRecorder, path: Path) -> None:
        self._inner = inner
        self._flight = flight
        self._path = path

    def __enter__(self) -> Self:
        self._inner.__enter__()
        signal.signal(signal.SIGUSR2, self._on_signal)
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inner.__exit__(exc_type, exc, traceback)
        if exc is not None:
            self._dump()

    def next_step(self, previous: StepResult | None) -> Step | None:
        return self._inner.next_step(previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._dump()

    def _dump(self) -> None:
        # A full disk must not be what an engine dies of, nor hide what it did die of.
        with contextlib.suppress(OSError):
            self._flight.dump(self._path)


def _require_writable(folder: str) -> None:
    """Make the folder and try it: a record that cannot be written would be missed when it is too late."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as exc:
        raise ConfigError(
            f"flight_dir must be a folder that can be written, got {folder!r} ({exc.strerror}); choose another"
        ) from exc


def _open(path: str) -> RecordingFile:
    try:
        return RecordingFile(path)
    except OSError as exc:
        raise ConfigError(
            f"record must name a file that can be written, got {path!r} ({exc.strerror}); choose another"
        ) from exc
