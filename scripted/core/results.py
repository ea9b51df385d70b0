"""Controls the step in which the result of each microbatch in flight becomes visible to the scheduler.

By default a microbatch launched in step n completes in step n + depth. A script may hold results and release them; a
stage that is stalled or cut off holds all.
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
        # Holds during which no result came due.
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
        """Take the microbatches that complete in this step out of flight and return their ids, in launch order."""
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
        """True while completions are withheld."""
        return self._held and not self._released

    def __len__(self) -> int:
        return len(self._in_flight)

    def hold(self) -> None:
        """Withhold every completion that is not taken yet."""
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

    def is_due(self, step: int) -> bool:
        """Return whether a microbatch in flight is due by this step."""
        return bool(self._in_flight) and self._in_flight[0][1] <= step

    def due_steps(self) -> dict[int, int]:
        """Return the step in which each microbatch in flight is due, by id."""
        return dict(self._in_flight)

    def lose(self) -> None:
        """Drop everything in flight: a stage died, so no result will come back."""
        self._in_flight.clear()

    def start_over(self) -> None:
        """Reset everything for the next script."""
        self._in_flight.clear()
        self.stalled.clear()
        self.cut.clear()
        self.release(None)
        self._ineffective_holds, self._has_kept, self.ineffective_releases = 0, True, 0
