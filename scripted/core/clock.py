"""Virtual time: a clock that only scripts and schedules advance."""

from __future__ import annotations


class VirtualClock:
    """A clock that moves only when it is advanced."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def now(self) -> float:
        """Return the total seconds by which the clock has been advanced."""
        return self._now_s

    def advance(self, seconds: float) -> None:
        """Move the clock forward. Raises ValueError for a negative number: time never goes back."""
        if seconds < 0:
            raise ValueError(f"advance() takes seconds >= 0, got {seconds}")
        self._now_s += seconds

    def reset(self) -> None:
        """Set the clock back to zero, between two scripts."""
        self._now_s = 0.0
