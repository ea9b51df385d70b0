"""Grammars that a script controls: when the scheduler hears that one is compiled.

By default a grammar that a step orders is ready in the next one, however long it takes to compile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from engine.messages import GrammarReady
from engine.plan import GrammarOrder


class HeldGrammars:
    """The orders to compile that are not answered, in their order."""

    def __init__(self) -> None:
        self._open: deque[int] = deque()
        self._may_come: int | None = None
        self._fails = False
        # How many answers were made errors.
        self.failed = 0

    def ordered(self, orders: Sequence[GrammarOrder]) -> None:
        self._open += [order.id for order in orders if order.grammar is not None]

    def take_due(self) -> Iterator[int]:
        """The ids whose answers the next step gets."""
        while self._open and self._may_come != 0:
            if self._may_come is not None:
                self._may_come -= 1
            yield self._open.popleft()

    def answer(self, ready: GrammarReady) -> GrammarReady:
        """What the scheduler is told: what the last stage said, unless the next one is to fail."""
        if not self._fails:
            return ready
        self._fails = False
        self.failed += 1
        why = f"grammar {ready.grammar_id} failed as it was told to"
        return GrammarReady(grammar_id=ready.grammar_id, error=why)

    @property
    def is_holding(self) -> bool:
        """True while an answer is kept back that nothing has released."""
        return self._may_come == 0 and bool(self._open)

    def __len__(self) -> int:
        return len(self._open)

    def hold(self) -> None:
        """Keep back every answer that is not yet taken."""
        self._may_come = 0

    def release(self, count: int | None) -> None:
        if count is None:
            self._may_come = None
        elif self._may_come is not None:
            self._may_come += count

    def fail_next(self) -> None:
        self._fails = True

    def spare_next(self) -> None:
        """Take back a failure that no answer has met."""
        self._fails = False

    def lose(self) -> None:
        self._open.clear()

    def start_over(self) -> None:
        self._open.clear()
        self._fails = False
        self.failed = 0
        self.release(None)
