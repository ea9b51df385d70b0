"""Everything open ends in time: once nothing comes from outside, within a number of steps set by the remaining work.

Without this promise a livelock shows only after thousands of steps, or when the run stalls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from scripted.core.violation import Violation

# The bound is this multiple of the steps that all open requests would take one after the other: preempted requests
# are computed again.
_TIMES: Final = 6
# Allowance for steps without computation: transfers, the compilation of grammars.
_SLACK_STEPS: Final = 200


class Liveness:
    """The step by which everything must have ended; every event from outside sets it again."""

    def __init__(self) -> None:
        self._due = 0
        self._work = 0

    def disturb(self) -> None:
        """Note that something happened from outside."""
        self._due = 0

    def is_late(self, step: int) -> bool:
        """Whether the coming step is one to judge, or one that sets the bound."""
        return step > self._due

    def check(self, step: int, work: int | None, busy: Callable[[], Sequence[str]]) -> None:
        """Judge the coming step; ``work`` is the number of steps that the open requests would take one after another.

        Raises Violation with the ``busy`` requests.
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
