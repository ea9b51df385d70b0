"""The rows: one slot in every stage's page table for each request that owns memory.

The number of rows is the number of requests that may be admitted at once. A request takes one row at admission and
gives it back with its pages.
"""

from __future__ import annotations

from engine.errors import IntegrityError

__all__ = ["RowPool"]


class RowPool:
    """``total`` rows; the lowest free one is handed out first."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a row pool needs total >= 1, got {total}")
        self.total = total
        self._taken = bytearray(total)
        self.free = total

    def __repr__(self) -> str:
        return f"RowPool(total={self.total}, free={self.free})"

    def allocate(self) -> int:
        """Take the lowest free row. The caller has asked ``free`` before."""
        row = self._taken.find(0)
        if row < 0:
            raise IntegrityError(f"no row is free of {self.total}: nobody asked first")
        self._taken[row] = 1
        self.free -= 1
        return row

    def release(self, row: int) -> None:
        """Give a row back."""
        if not self._taken[row]:
            raise IntegrityError(f"row {row} is free already: it was released twice")
        self._taken[row] = 0
        self.free += 1

    def is_taken(self, row: int) -> bool:
        """True while a request owns this row."""
        return bool(self._taken[row])

    def reset(self) -> None:
        """Forget every owner. Only for an engine that is quiescent: whoever still owns a row is not asked."""
        self._taken = bytearray(self.total)
        self.free = self.total

    def check_integrity(self) -> None:
        """Free rows as booked equal free rows as counted. Raises IntegrityError with both."""
        counted = self._taken.count(0)
        if counted != self.free:
            raise IntegrityError(f"{self.free} rows are booked as free, but {counted} of {self.total} are")
