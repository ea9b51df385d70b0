"""The flight recorder: keeps the last steps in bounded memory, and dumps them when the engine fails.

It costs one append for each step. Its dump is a recording that can be replayed from its first checkpoint, if the engine
was ever idle.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Final

from engine.core.recording.format import Header, frame_bytes, write_frames

# About two minutes of a busy engine at 30 steps a second; at a kilobyte a step that is 4 MB.
FLIGHT_LIMIT_STEPS: Final = 4096
# Checkpoints are at least this fraction of the limit apart, so most of the kept steps follow the oldest one.
_CHECKPOINTS: Final = 4


class FlightRecorder:
    """A sink that drops the oldest frames. ``header`` begins the recording, ``path`` receives the dump of a failure."""

    def __init__(self, header: Header, path: Path | None = None, *, limit_steps: int = FLIGHT_LIMIT_STEPS) -> None:
        self._header = header
        self._path = path
        self._frames: deque[bytes] = deque(maxlen=limit_steps)
        self._taken = 0
        self._apart = max(1, limit_steps // _CHECKPOINTS)
        # Checkpoints, each with the number of frames before it.
        self._checkpoints: deque[tuple[int, Callable[[], bytes]]] = deque()

    @property
    def dropped(self) -> int:
        return self._taken - len(self._frames)

    def write(self, frame: bytes) -> None:
        """Append a frame; skip the first, because the recorder has its own header."""
        if self._taken or frame != frame_bytes(self._header):
            self._taken += 1
            self._frames.append(frame)
            if self._checkpoints and self._checkpoints[0][0] < self.dropped:
                self._checkpoints.popleft()

    @property
    def wants_checkpoint(self) -> bool:
        last = self._checkpoints[-1][0] if self._checkpoints else 0
        return self._taken - last >= self._apart

    def mark(self, frame: Callable[[], bytes]) -> None:
        """Keep a checkpoint: the state of the scheduler before the next frame."""
        self._checkpoints.append((self._taken, frame))

    def close(self, *, failed: bool) -> None:
        if failed:
            self.leave()

    def leave(self) -> None:
        """Dump to ``path``. A full disk must neither kill the engine nor hide the cause of its death."""
        if self._path is not None:
            with contextlib.suppress(OSError):
                self.dump(self._path)

    def dump(self, path: str | Path) -> Path:
        """Write the kept steps as a recording, from the oldest checkpoint on.

        Without a checkpoint it has all kept steps, which can be read but not replayed.
        """
        frames, first, begin = list(self._frames), self.dropped, []
        if first and self._checkpoints:
            before, checkpoint = self._checkpoints[0]
            frames, first, begin = frames[before - first :], before, [checkpoint()]
        header = Header(limits=self._header.limits, redacted=self._header.redacted, first_step=first + 1)
        write_frames(Path(path), [frame_bytes(header), *begin, *frames])
        return Path(path)
