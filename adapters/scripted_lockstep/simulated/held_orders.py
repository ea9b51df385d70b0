"""Orders that the stages carry out beside the computation, and when the scheduler gets their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class HeldOrders:
    """The unanswered orders by their numbers, in order.

    By default the answer to an order of one step comes in the next.
    """

    def __init__(self) -> None:
        self._open: deque[int] = deque()
        self._may_come: int | None = None

    def ordered(self, numbers: Iterable[int]) -> None:
        self._open += numbers

    def take_due(self) -> Iterator[int]:
        """Take the numbers of the orders whose answers the next step gets."""
        while self._open and self._may_come != 0:
            if self._may_come is not None:
                self._may_come -= 1
            yield self._open.popleft()

    def is_open(self, number: int) -> bool:
        return number in self._open

    @property
    def is_holding(self) -> bool:
        """True while an unreleased answer is held."""
        return self._may_come == 0 and bool(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def hold(self) -> None:
        """Hold every answer that is not yet taken."""
        self._may_come = 0

    def release(self, count: int | None) -> None:
        if count is None:
            self._may_come = None
        elif self._may_come is not None:
            self._may_come += count

    def lose(self) -> None:
        self._open.clear()

    def start_over(self) -> None:
        self._open.clear()
        self.release(None)
