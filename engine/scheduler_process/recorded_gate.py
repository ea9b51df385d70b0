"""What a server writes down of its own steps: a whole recording, a flight record of the last ones, both or none.

Wraps the gate where the settings ask for it; a server that records nothing runs its gate bare.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from engine.errors import ConfigError
from engine.output_files import told_of
from engine.recording import FlightRecorder, Header, RecordingFile, RecordingGate, Redactor, Sink
from engine.scheduler.ports import Gate
from engine.scheduler.scheduler import Scheduler
from engine.settings import ServerSettings


def recorded(gate: Gate, scheduler: Scheduler, settings: ServerSettings) -> Gate:
    """The gate, recorded as the settings ask. Raises ConfigError for a place that cannot be written.

    The flight record is dumped when the loop dies, and whenever the process gets SIGUSR2.
    """
    sinks: list[Sink] = []
    header = Header(limits=scheduler.limits, redacted=settings.record_redacted)
    try:
        if settings.record:
            sinks.append(RecordingFile(settings.record))
        if settings.flight_dir:
            path = flight_path(settings.flight_dir, os.getpid())
            path.parent.mkdir(parents=True, exist_ok=True)
            flight = FlightRecorder(header, path)
            signal.signal(signal.SIGUSR2, lambda *_: flight.leave())
            sinks.append(flight)
    except OSError as exc:
        raise ConfigError(
            f"record and flight_dir must be places that can be written, got {told_of(exc)}; choose another"
        ) from exc
    redactor = Redactor() if settings.record_redacted else None
    return RecordingGate(gate, scheduler, sinks, redactor=redactor) if sinks else gate


def flight_path(folder: str, pid: int) -> Path:
    """Where the scheduler process ``pid`` leaves its flight record."""
    return Path(folder) / f"flight-{pid}.rec"
