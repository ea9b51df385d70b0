"""The rows: one slot in every stage's page table for each request that owns memory.

The number of rows is the number of requests that may be admitted at once. A request takes one row at admission and
gives it back with its pages.
"""

from __future__ import annotations

from typing import Final

from engine.errors import IntegrityError

_FREE: Final = 0
_TAKEN: Final = 1
_RESERVED: Final = 2


class RowPool:
    """``total`` rows; the lowest free one is handed out first."""

    def __init__(self, total: int) -> None:
        if total < 1:
            raise ValueError(f"a row pool needs total >= 1, got {total}")
        self.total = total
        self._rows = bytearray(total)
        self.free = total
        self.reserved = 0

    def __repr__(self) -> str:
        return f"RowPool(total={self.total}, free={self.free})"

    def allocate(self) -> int:
        """Take the lowest free row. The caller has asked ``free`` before."""
        row = self._rows.find(_FREE)
        if row < 0:
            raise IntegrityError(f"no row is free of {self.total}: ask first")
        self._rows[row] = _TAKEN
        self.free -= 1
        return row

    def release(self, row: int) -> None:
        if not self.is_taken(row):
            raise IntegrityError(f"row {row} is free already: it was released twice")
        self._rows[row] = _FREE
        self.free += 1

    def reserve(self, count: int) -> None:
        """Keep ``count`` free rows from requests, highest first."""
        if count > self.free:
            raise IntegrityError(f"reserve({count}) with {self.free} rows free of {self.total}: ask first")
        for _ in range(count):
            self._rows[self._rows.rfind(_FREE)] = _RESERVED
        self.free -= count
        self.reserved += count

    def release_reserved(self, count: int) -> None:
        """Give back up to ``count`` of the rows that are kept from requests, lowest first."""
        for _ in range(count := min(count, self.reserved)):
            self._rows[self._rows.find(_RESERVED)] = _FREE
        self.reserved -= count
        self.free += count

    def is_taken(self, row: int) -> bool:
        """True while a request owns this row."""
        return self._rows[row] == _TAKEN

    def reset(self) -> None:
        """Forget every owner but the operator. Only for an engine that is quiescent: no request is asked."""
        self._rows = self._rows.replace(bytes([_TAKEN]), bytes([_FREE]))
        self.free = self.total - self.reserved

    def counted(self) -> tuple[int, int]:
        """Rows that are free and rows that are reserved, by counting them."""
        return self._rows.count(_FREE), self._rows.count(_RESERVED)
