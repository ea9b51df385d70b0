"""Record and replay: every step's events written down at the gate, and run again without model or sockets.

A gate around a gate on the way in, a gate of its own on the way back; nothing here decides what a step does.
"""

from engine.core.recording.flight import FlightRecorder
from engine.core.recording.format import (
    End,
    Header,
    RecordedStep,
    Recording,
    RecordingError,
    RecordingFile,
    read_recording,
)
from engine.core.recording.recording_gate import RecordingGate, Sink
from engine.core.recording.redaction import Redactor
from engine.core.recording.replay_gate import ReplayDiffers, ReplayGate

__all__ = [
    "End",
    "FlightRecorder",
    "Header",
    "RecordedStep",
    "Recording",
    "RecordingError",
    "RecordingFile",
    "RecordingGate",
    "Redactor",
    "ReplayDiffers",
    "ReplayGate",
    "Sink",
    "read_recording",
]
