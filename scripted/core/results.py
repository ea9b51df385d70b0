"""Completions that a script controls: when the result of each microbatch in flight becomes visible to the scheduler.

By default a microbatch launched in step n completes in step n + depth. A script may hold results and release them,
and a stalled stage, or one that is cut off, holds all of them.
"""

from __future__ import annotations

from collections import deque


class Results:
    """The microbatches in flight with the step in which each is due, in launch order."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self._in_flight: deque[tuple[int, int]] = deque()
        self._held = False
        self._released = 0
        self.stalled: set[int] = set()
        self.cut: set[int] = set()
        # How often something was held and nothing came that would have been kept back.
        self._ineffective_holds = 0
        self._has_kept = True
        # Releases while nothing was held.
        self.ineffective_releases = 0

    @property
    def ineffective_holds(self) -> int:
        return self._ineffective_holds + (not self._has_kept)

    def launched(self, microbatch_id: int, step: int) -> None:
        self._in_flight.append((microbatch_id, step + self._depth))

    def take_due(self, step: int) -> list[int]:
        """The ids of the microbatches whose completions this step gets, in launch order; they leave the flight."""
        taken: list[int] = []
        while self._in_flight and not self.stalled and not self.cut:
            microbatch_id, due = self._in_flight[0]
            if due > step:
                break
            if self._held:
                self._has_kept = True
            if self._held and not self._released:
                break
            if self._held:
                self._released -= 1
            self._in_flight.popleft()
            taken.append(microbatch_id)
        return taken

    @property
    def is_holding(self) -> bool:
        """True while completions are kept back that nothing has released."""
        return self._held and not self._released

    def __len__(self) -> int:
        return len(self._in_flight)

    def hold(self) -> None:
        """Keep back every completion that is not yet taken."""
        self._ineffective_holds += not self._has_kept
        self._held, self._has_kept = True, False
        self._released = 0

    def release(self, count: int | None) -> None:
        self.ineffective_releases += not self._held
        if count is None:
            self._held = False
            self._released = 0
        else:
            self._released += count

    def due_steps(self) -> dict[int, int]:
        """The step in which each microbatch in flight is due, by id."""
        return dict(self._in_flight)

    def lose(self) -> None:
        """Drop everything in flight: a stage died, so none of it will come back."""
        self._in_flight.clear()

    def start_over(self) -> None:
        """Forget all that was held, stalled or launched."""
        self._in_flight.clear()
        self.stalled.clear()
        self.cut.clear()
        self.release(None)
        self._ineffective_holds, self._has_kept, self.ineffective_releases = 0, True, 0
