"""Everything open ends in time: once nothing happens from outside, within a number of steps that the work sets.

Without it a livelock is noticed only after thousands of steps, or when the run stalls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from scripted.core.violation import Violation

# The bound is this multiple of the steps that all open requests would take one after the other: preempted requests
# are computed again.
_TIMES: Final = 6
# For what takes steps without computing: transfers, the compilation of grammars.
_SLACK_STEPS: Final = 200


class Liveness:
    """The step by which all must have ended; it is set anew after every event from outside."""

    def __init__(self) -> None:
        self._due = 0
        self._work = 0

    def disturb(self) -> None:
        """Note that something happened from outside."""
        self._due = 0

    def is_late(self, step: int) -> bool:
        """Whether the step that begins is one to judge, or to set the bound in."""
        return step > self._due

    def check(self, step: int, work: int | None, busy: Callable[[], Sequence[str]]) -> None:
        """Judge the step that begins; ``work`` is the number of steps that the open requests would take in a row.

        Raises Violation that names the ``busy`` requests.
        """
        if work is None:
            return
        if not self._due:
            self._work, self._due = work, step + _TIMES * work + _SLACK_STEPS
        elif names := busy():
            raise Violation(
                f"nothing has happened from outside for {_TIMES * self._work + _SLACK_STEPS} steps, and the open "
                f"requests would take {self._work} one after the other, but some have not ended: {', '.join(names)}"
            )
