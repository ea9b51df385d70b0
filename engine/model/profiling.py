"""The profile of one stage: torch's own profiler around its forwards, written as a trace for Perfetto or Chrome.

Off, it costs one comparison a microbatch. Bounded in steps, because a trace grows with every operator of every forward.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

__all__ = ["PROFILE_LIMIT_STEPS", "StageProfile"]

PROFILE_LIMIT_STEPS: Final = 200


class StageProfile:
    """Taken from its making on, in the thread that computes; ``path`` has the trace when it has stopped.

    Raises OSError when the folder cannot be written.
    """

    def __init__(self, folder: str, stage: int) -> None:
        Path(folder).mkdir(mode=0o700, parents=True, exist_ok=True)
        self.path = Path(folder) / f"stage-{stage}.json"
        self.path.touch()
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile: profile | None = profile(activities=activities)
        self._steps = 0
        self._profile.start()

    def note_step(self) -> None:
        """Count a microbatch; the last one that is allowed stops the profile."""
        self._steps += 1
        if self._steps >= PROFILE_LIMIT_STEPS:
            self.stop()

    def stop(self) -> None:
        """Stop measuring and write the trace; idempotent."""
        stopped, self._profile = self._profile, None
        if stopped is not None:
            stopped.stop()
            stopped.export_chrome_trace(str(self.path))
