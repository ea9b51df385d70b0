"""Orders that the stages carry out beside the computation, and when the scheduler gets their answers."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator


class HeldOrders:
    """The numbers of the unanswered orders, oldest first.

    Unless answers are held, an order is answered in the next step.
    """

    def __init__(self) -> None:
        self._open: deque[int] = deque()
        # The number of held answers that may be taken; None while answers are not held.
        self._released: int | None = None

    def ordered(self, numbers: Iterable[int]) -> None:
        self._open += numbers

    def take_due(self) -> Iterator[int]:
        """Take the orders that are answered in the next step."""
        while self._open and self._released != 0:
            if self._released is not None:
                self._released -= 1
            yield self._open.popleft()

    def is_open(self, number: int) -> bool:
        return number in self._open

    @property
    def is_holding(self) -> bool:
        """True while a held answer has not been released."""
        return self._released == 0 and bool(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def hold(self) -> None:
        """Hold all answers that have not been taken."""
        self._released = 0

    def release(self, count: int | None) -> None:
        if count is None:
            self._released = None
        elif self._released is not None:
            self._released += count

    def lose(self) -> None:
        self._open.clear()

    def start_over(self) -> None:
        self._open.clear()
        self.release(None)
