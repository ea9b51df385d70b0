"""The flight recorder: the last steps in memory, bounded, for the moment when somebody needs them.

It costs one append a step and holds no step longer than that; what it dumps is a recording.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Final

from engine.recording.format import Header, frame_bytes, write_frames

__all__ = ["FLIGHT_LIMIT_STEPS", "FlightRecorder"]

# About two minutes of a busy engine at 30 steps a second; at a kilobyte a step that is 4 MB.
FLIGHT_LIMIT_STEPS: Final = 4096


class FlightRecorder:
    """A sink that forgets the oldest frames. ``header`` says what is recorded."""

    def __init__(self, header: Header, *, limit_steps: int = FLIGHT_LIMIT_STEPS) -> None:
        self._header = header
        self._frames: deque[bytes] = deque(maxlen=limit_steps)
        self._taken = 0

    @property
    def dropped(self) -> int:
        """Frames that are forgotten."""
        return self._taken - len(self._frames)

    def write(self, frame: bytes) -> None:
        """Take one frame; the recorder has a header of its own, so the first one is left out."""
        if self._taken or frame != frame_bytes(self._header):
            self._taken += 1
            self._frames.append(frame)

    def close(self) -> None:
        """Nothing to close: what is held can still be dumped."""

    def dump(self, path: str | Path) -> Path:
        """Write what is held as a recording; it can be replayed when nothing was dropped."""
        header = Header(limits=self._header.limits, redacted=self._header.redacted, first_step=self.dropped + 1)
        write_frames(Path(path), [frame_bytes(header), *self._frames])
        return Path(path)
