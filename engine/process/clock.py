"""Clocks: production has the monotonic one, the harness a clock that only a script advances.

The scheduler core never reads a clock; its gate does, and passes ``now`` to each step.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time, in seconds since an arbitrary start."""

    def now(self) -> float:
        """Return the seconds since this clock's start; they never go back."""


class MonotonicClock:
    def now(self) -> float:
        """Return the machine's monotonic clock, in seconds."""
        return time.monotonic()
