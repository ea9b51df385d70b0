"""The window pool of the executable specification: the window pages beside pages, counted again at each query.

Names in bold are the rules of docs/rules.md. This module knows neither the order of requests nor time nor the numbers
of window pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.core.limits import Limits
from scripted_lockstep.specification.request import Page, SpecifiedRequest


class SpecifiedWindow:
    """The window pool. ``beside`` has the cached pages with a window page, in the order in which requests left them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.beside: dict[Page, None] = {}
        self.reserved_pages = 0

    def first_page(self, position: int) -> int:
        """**Window**: the first page that the token at this position sees: W tokens, itself included."""
        return max(0, position - self._limits.window_tokens + 1) // self._limits.page_size

    def free_pages(self, owners: Iterable[SpecifiedRequest]) -> int:
        """Window pages that are neither held by a request nor cached nor reserved."""
        return self._limits.window_pages - self.reserved_pages - len(self.beside) - _held_by(owners)

    def available_pages(self, owners: Iterable[SpecifiedRequest], hit: Sequence[Page] = ()) -> int:
        """Window pages that are free, or cached and unused, if ``owners`` owned all and ``hit`` were used too."""
        used = {page for owner in owners for page in owner.prefix[owner.window_start :]}.union(self.seen_of(hit))
        return self._limits.window_pages - self.reserved_pages - _held_by(owners) - len(used)

    def seen_of(self, hit: Sequence[Page]) -> Sequence[Page]:
        """Return the pages of a prefix that the next token sees."""
        return hit[self.first_page(len(hit) * self._limits.page_size) :]

    def usable(self, hit: Sequence[Page]) -> Sequence[Page]:
        """**Window hit**: the longest prefix whose next token sees only cached pages."""
        lengths = range(len(hit), 0, -1)
        return hit[: next((n for n in lengths if all(page in self.beside for page in self.seen_of(hit[:n]))), 0)]

    def need(self, pages: int, hit: Sequence[Page]) -> int:
        """**Window room**: one for each new page; with the visible ones at most as many as a row uses at once."""
        seen = len(self.seen_of(hit))
        return min(pages - len(hit), self._limits.row_window_pages - seen)

    def leave(self, prefix: Sequence[Page]) -> None:
        """**Window evict**: note that a request left these pages; of pages left together, the last goes first."""
        for page in reversed(prefix):
            del self.beside[page]
            self.beside[page] = None

    def evict(self, count: int, owners: Iterable[SpecifiedRequest]) -> None:
        """Take this many window pages from cached pages that no request sees, or all of them."""
        used = {page for owner in owners for page in owner.prefix[owner.window_start :]}
        for page in [page for page in self.beside if page not in used][: max(0, count)]:
            del self.beside[page]


def _held_by(owners: Iterable[SpecifiedRequest]) -> int:
    return sum([owner.pages - max(len(owner.prefix), owner.window_start) for owner in owners])
