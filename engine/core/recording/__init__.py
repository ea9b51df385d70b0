"""Record and replay: a gate records every step's events, another gate replays them without model or sockets.

Neither decides the content of a step.
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
