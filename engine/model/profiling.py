"""The profile of one stage: torch's own profiler around its forward passes, written as a trace for Perfetto or Chrome.

When off it costs one comparison per microbatch. Limited in steps, because a trace grows with every operator of every
forward pass. Never fails a microbatch: ``stop`` reports errors.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from lockstep.output_files import open_private

PROFILE_LIMIT_STEPS: Final = 200

_TAIL_BYTES: Final = 16


class StageProfile:
    """A profile, which starts at its creation, in the computing thread; ``path`` has the trace once it has stopped.

    Raises OSError when the folder cannot be written.
    """

    def __init__(self, folder: str, stage: int) -> None:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = Path(folder) / f"stage-{stage}.json"
        open_private(self.path).close()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = profile(activities=activities)
        self._failure: Exception | None = None
        self._steps = 0
        self._profile.start()

    def note_step(self) -> None:
        """Count a microbatch; the last allowed one stops the profile."""
        self._steps += 1
        if self._steps >= PROFILE_LIMIT_STEPS:
            self._end()

    def stop(self) -> None:
        """Stop measuring and write the trace; idempotent. Raises OSError if the trace is incomplete."""
        self._end()
        if self._failure is not None:
            why = f"the trace {self.path} must be complete, but {self._failure}"
            raise OSError(f"{why}; make room for it there and profile again") from self._failure

    def _end(self) -> None:
        stopped, self._profile = self._profile, None
        if stopped is None:
            return
        try:
            stopped.stop()
            stopped.export_chrome_trace(str(self.path))
            _require_whole(self.path)
        except Exception as exc:  # noqa: BLE001 - no exception of the profiler may end a stage that serves
            self._failure = exc


def _require_whole(trace: Path) -> None:
    """Raise OSError for a trace without its end: the profiler only logs write errors."""
    with trace.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        if not file.read().rstrip().endswith(b"}"):
            raise OSError(f"it ends after {size} bytes")
