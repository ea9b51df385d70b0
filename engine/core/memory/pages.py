"""The page pool: each page of KV is free, held by a request, cached, or reserved. Rows have a pool too.

A page has one byte of state, so it cannot be free and owned at once. The pool never decides who gets a page. A request
takes pages when its tokens are planned and releases them once, at its end or at retraction.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from engine.core.errors import IntegrityError


class PageState(IntEnum):
    """The owner of a page: nobody, one live request, the prefix tree, or an operator who withholds it."""

    FREE = 0
    HELD = 1
    CACHED = 2
    RESERVED = 3


# Constants: every step looks some up, and a lookup on the class takes four to ten times as long.
FREE, HELD, CACHED, RESERVED = _STATES = tuple(PageState)
# Plain numbers, because a search for them in the bytes of the pool is faster.
_FREE, _HELD, _CACHED, _RESERVED = map(int, _STATES)
_FREE_UNLESS_RESERVED = bytes(state if state == _RESERVED else _FREE for state in range(256))


class PagePool:
    """``total`` pages of ``page_size`` tokens. The lowest free page is handed out first.

    A pool of rows, the places in the stages' page tables, has another ``unit``: a request with memory holds one row,
    and no row is cached.
    """

    def __init__(self, total: int, page_size: int = 1, *, unit: str = "page") -> None:
        if total < 1 or page_size < 1:
            raise ValueError(f"a {unit} pool needs total >= 1 and page_size >= 1, got {total} and {page_size}")
        self.unit = unit
        self.total = total
        self.page_size = page_size
        self._states = bytearray(total)
        self._lowest = 0
        self.free = total
        self.held = 0
        self.cached = 0
        self.reserved = 0

    def __repr__(self) -> str:
        kept = f", reserved={self.reserved}" if self.reserved else ""
        return f"PagePool(total={self.total}, free={self.free}, held={self.held}, cached={self.cached}{kept})"

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` free pages for a request, lowest first. The caller has checked ``free``."""
        if count > self.free:
            raise IntegrityError(f"allocate({count}) with {self.free} {self.unit}s free of {self.total}: ask first")
        states, cursor, pages = self._states, self._lowest, []
        for _ in range(count):
            cursor = states.find(_FREE, cursor)
            states[cursor] = _HELD
            pages.append(cursor)
        if pages:
            self._lowest = cursor + 1
        self.free -= count
        self.held += count
        return pages

    def hold(self, pages: Sequence[int]) -> None:
        """Take exactly these pages, which must be free."""
        self._move(pages, _FREE, _HELD)
        self.free -= len(pages)
        self.held += len(pages)

    def release(self, pages: Sequence[int]) -> None:
        """Free pages that a request held."""
        self._move(pages, _HELD, _FREE)
        self.held -= len(pages)
        self.free += len(pages)

    def cache(self, pages: Sequence[int]) -> None:
        """Hand a request's held pages over to the prefix tree."""
        self._move(pages, _HELD, _CACHED)
        self.held -= len(pages)
        self.cached += len(pages)

    def evict(self, pages: Sequence[int]) -> None:
        """Free pages of the prefix tree."""
        self._move(pages, _CACHED, _FREE)
        self.cached -= len(pages)
        self.free += len(pages)

    def reserve(self, count: int) -> None:
        """Withhold ``count`` free pages, highest first, so that requests get the same pages as without pressure."""
        if count > self.free:
            raise IntegrityError(f"reserve({count}) with {self.free} {self.unit}s free of {self.total}: ask first")
        for _ in range(count):
            self._states[self._states.rfind(_FREE)] = _RESERVED
        self.free -= count
        self.reserved += count

    def release_reserved(self, count: int) -> None:
        """Free up to ``count`` reserved pages, lowest first."""
        for _ in range(count := min(count, self.reserved)):
            page = self._states.find(_RESERVED)
            self._states[page] = _FREE
            self._lowest = min(self._lowest, page)
        self.reserved -= count
        self.free += count

    def state(self, page: int) -> PageState:
        return _STATES[self._states[page]]

    def all_are(self, state: PageState, pages: Sequence[int]) -> bool:
        """Return whether these pages are all in one state."""
        states, wanted = self._states, int(state)
        for page in pages:  # noqa: SIM110 - all() over a generator costs twice as much, and this is half of an audit
            if states[page] != wanted:
                return False
        return True

    def reset(self) -> None:
        """Free all pages but the operator's. Requires a quiescent engine, and checks no request."""
        self._states = self._states.translate(_FREE_UNLESS_RESERVED)
        self._lowest = 0
        self.free, self.held, self.cached = self.total - self.reserved, 0, 0

    def counted(self) -> tuple[int, int, int, int]:
        """Count the free, held, cached and reserved pages."""
        count = self._states.count
        return count(_FREE), count(_HELD), count(_CACHED), count(_RESERVED)

    @property
    def hides_free(self) -> bool:
        """Return whether a free page lies below the cursor, where ``allocate`` does not search."""
        return self._states.find(_FREE, 0, self._lowest) >= 0

    def _move(self, pages: Sequence[int], source: int, target: int) -> None:
        states = self._states
        for page in pages:
            if states[page] != source:
                raise IntegrityError(
                    f"{self.unit} {page} is {PageState(states[page]).name}, not {PageState(source).name}: "
                    f"it cannot become {PageState(target).name}"
                )
            states[page] = target
        if target == _FREE and pages:
            self._lowest = min(self._lowest, *pages)
