"""Work is not thrown away for nothing: a request loses its blocks only if another one gets further by it.

Also bounds the steps in which a scheduler asks for another step and computes nothing. The limits come from the
workload: no other request's prompt, output or blocks need what the victim gave up.
"""

from __future__ import annotations

from typing import Final, Protocol, runtime_checkable

from scripted.core.violation import Violation

# Steps that compute nothing and ask for another one: this many, and a few for each launch.
_EMPTY_STEPS: Final = 256
_EMPTY_STEPS_A_LAUNCH: Final = 8


@runtime_checkable
class TellsWork(Protocol):
    """A machine that works in steps without a launch and a reply of its own, such as a fleet."""

    @property
    def is_working(self) -> bool:
        """Whether its last step was given something, did something, or left something to be computed."""
        ...


class Preemptions:
    """Lost blocks and the progress since: ``gains`` counts requests that began, ended or took another block.

    An event from outside counts as a gain: it may change which requests should run.
    """

    def __init__(self, block_size: int, most_in_vain: int) -> None:
        self._block_size = block_size
        # How often in a row a request may lose its blocks for nothing, and the violation's text once it exceeds that.
        self._most_in_vain = most_in_vain
        self.wasted = ""
        self.gains = 0
        # By rid: the gains when it lost its blocks, and how often it lost them for nothing.
        self._lost: dict[str, int] = {}
        self._for_nothing: dict[str, int] = {}

    def lose(self, rid: str) -> None:
        """Note that a request lost its blocks."""
        self._lost.setdefault(rid, self.gains)

    def begin(self, rid: str) -> None:
        """Note the launch of a request without blocks; ``wasted`` says whether its last losses were for nothing."""
        lost = self._lost.pop(rid, None)
        if lost is not None:
            times = self._for_nothing[rid] = self._for_nothing.get(rid, 0) + 1 if lost == self.gains else 0
            if times > self._most_in_vain:
                self.wasted = (
                    f"{rid} lost its blocks {times} times in a row for nothing: until it was launched again no other "
                    "request began, ended or took a block"
                )
        self.gains += 1

    def disturb(self) -> None:
        """Note an action from outside, which may have ended what made the requests lose their blocks."""
        self.gains += 1
        self._for_nothing.clear()

    def compute(self, start: int, count: int) -> None:
        """Note computed positions: each position that starts a block takes another block."""
        if (start + count - 1) // self._block_size > (start - 1) // self._block_size:
            self.gains += 1

    def end(self, rid: str) -> None:
        """Note the end of a request."""
        self.gains += 1
        self._lost.pop(rid, None)
        self._for_nothing.pop(rid, None)


class EmptySteps:
    """The share of steps without events that did nothing and asked for another one. ``launched`` counts launches."""

    def __init__(self) -> None:
        self._empty = 0
        self.launched = 0

    def count(self) -> None:
        """Judge one such step. Raises Violation."""
        self._empty += 1
        most = _EMPTY_STEPS + _EMPTY_STEPS_A_LAUNCH * self.launched
        if self._empty > most:
            raise Violation(
                f"{self._empty} steps were given nothing, did nothing and asked for another step, of at most {most} "
                f"beside {self.launched} launches: the scheduler keeps looking"
            )
