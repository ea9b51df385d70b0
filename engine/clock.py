"""Where time comes from: the monotonic clock in production, a clock that only a script moves in the harness.

The scheduler core never asks a clock; its gate does and hands ``now`` to each step.
"""

from __future__ import annotations

import time
from typing import Protocol

__all__ = ["Clock", "MonotonicClock", "VirtualClock"]


class Clock(Protocol):
    """Anything that tells the time in seconds since an arbitrary start."""

    def now(self) -> float:
        """Seconds since this clock's start; never goes back."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of the machine's monotonic clock."""
        return time.monotonic()


class VirtualClock:
    """A clock that stands still until it is advanced."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Seconds that this clock was advanced by, in all."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward. Raises ValueError for a negative number: time never goes back."""
        if seconds < 0:
            raise ValueError(f"advance() takes seconds >= 0, got {seconds}")
        self._now_s += seconds

    def reset(self) -> None:
        """Back to zero, for the next script; only the harness does this, between two runs."""
        self._now_s = 0.0
