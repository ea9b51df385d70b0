"""Where time comes from: the monotonic clock in production; the harness has a clock that only a script moves.

The scheduler core never asks a clock; its gate does and hands ``now`` to each step.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Anything that tells the time in seconds since an arbitrary start."""

    def now(self) -> float:
        """Seconds since this clock's start; never goes back."""


class MonotonicClock:
    def now(self) -> float:
        """Seconds of the machine's monotonic clock."""
        return time.monotonic()
