"""The window pool: the KV of the layers that see only the last ``window_tokens`` tokens of a request.

A held or cached page may have a *window page* for the same tokens. A request releases a window page once no later token
sees it, long before its page. Decides neither order nor time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.core.errors import IntegrityError
from engine.core.limits import Limits
from engine.core.memory.lease import Lease
from engine.core.memory.pages import PagePool

NO_WINDOW_PAGE: Final = -1


class SlidingWindowPool:
    """``pages`` are the window pages; ``users`` counts the leases that may read each cached one.

    ``beside`` has the window page of each page. A held page of a lease has one exactly from the lease's
    ``window_start`` on. The window page of a cached page may have been evicted while no lease used it: then prefixes
    that need it do not match. ``idle`` are the pages of the tree whose window pages no lease uses, in the order of
    eviction. ``row_pages`` is the maximum that one request uses at once.
    """

    def __init__(
        self, *, total_pages: int, window_pages: int, page_size: int, window_tokens: int, row_pages: int
    ) -> None:
        self.pages = PagePool(window_pages, page_size)
        self._page_size = page_size
        self._window_tokens = window_tokens
        self._row_pages = row_pages
        self._total_pages = total_pages
        self.reset()

    @classmethod
    def of(cls, limits: Limits) -> SlidingWindowPool | None:
        """Return the empty window pool of an engine; None for a model without window layers."""
        if not limits.window_tokens:
            return None
        return cls(
            total_pages=limits.total_pages,
            window_pages=limits.window_pages,
            page_size=limits.page_size,
            window_tokens=limits.window_tokens,
            row_pages=limits.row_window_pages,
        )

    def reset(self) -> None:
        """Drop every window page and every user."""
        self.pages.reset()
        self.beside = [NO_WINDOW_PAGE] * self._total_pages
        self.users = [0] * self.pages.total
        self.idle: dict[int, None] = {}

    # -- reading --

    @property
    def available_pages(self) -> int:
        """Free and idle window pages."""
        return self.pages.free + len(self.idle)

    def first_page(self, position: int) -> int:
        """Return the first of a request's pages that a query at this position or later sees."""
        return max(0, (position - self._window_tokens + 1) // self._page_size)

    def window_pages_of(self, lease: Lease, start: int) -> tuple[int, ...]:
        """Return the window pages of ``lease.pages[start:]``, NO_WINDOW_PAGE for a page without one that the lease may
        read.
        """
        beside, first = self.beside, max(start, lease.window_start)
        return (NO_WINDOW_PAGE,) * (first - start) + tuple([beside[page] for page in lease.pages[first:]])

    def usable_pages(self, pages: Sequence[int]) -> int:
        """Return how many pages of a cached prefix a request can continue: the window before its end must be cached."""
        missing = usable = 0
        for count, page in enumerate(pages, 1):
            if self.beside[page] == NO_WINDOW_PAGE:
                missing = count
            if self.first_page(count * self._page_size) >= missing:
                usable = count
        return usable

    def need(self, pages: int, *, cached: int = 0) -> int:
        """Return the maximum window pages that a request of this many pages takes after a cached prefix."""
        seen = cached - self.first_page(cached * self._page_size)
        return min(pages - cached + seen, self._row_pages) - seen

    def available_pages_without(self, leases: Sequence[Lease]) -> int:
        """Return the window pages available after a release of these leases."""
        used: dict[int, int] = {}
        for lease in leases:
            for page in lease.pages[lease.window_start :]:
                used[self.beside[page]] = used.get(self.beside[page], 0) + 1
        return self.available_pages + sum(self.users[window_page] in (0, count) for window_page, count in used.items())

    def become(self, window_pages: Sequence[tuple[int, int]]) -> None:
        """Restore these window pages of the tree's pages, in the order of eviction, into an empty pool."""
        taken = [window_page for _, window_page in window_pages]
        self.pages.hold(taken)
        self.pages.cache(taken)
        for page, window_page in window_pages:
            self.beside[page] = window_page
            self.idle[page] = None

    # -- the life of a lease --

    def attach(self, lease: Lease) -> None:
        """Protect the window of a new lease in its cached prefix."""
        lease.window_start = self.first_page(len(lease.pages) * self._page_size)
        for page in lease.pages[lease.window_start :]:
            self._use(page)

    def add(self, pages: Sequence[int]) -> None:
        """Give each of a lease's new pages a window page. The caller has checked ``available_pages``."""
        self.evict(len(pages) - self.pages.free)
        for page, window_page in zip(pages, self.pages.allocate(len(pages)), strict=True):
            self.beside[page] = window_page

    def slide(self, lease: Lease, position: int) -> None:
        """Release the window pages that no query from ``position`` on sees. All tokens before it are computed."""
        first = min(self.first_page(position), len(lease.pages))
        if first > lease.window_start:
            self._give_back(lease, first)
            lease.window_start = first

    def publish(self, own: int, cached: int) -> None:
        """Follow a page that was handed over to the tree, or replaced by the tree's page.

        Replaces an evicted window page of the tree.
        """
        window_page = self.beside[own]
        if window_page == NO_WINDOW_PAGE:
            return
        if own != cached:
            self.beside[own] = NO_WINDOW_PAGE
            if self.beside[cached] != NO_WINDOW_PAGE:
                self.pages.release((window_page,))
                self._use(cached)
                return
            self.beside[cached] = window_page
        self.pages.cache((window_page,))
        self.users[window_page] = 1

    def release(self, lease: Lease) -> None:
        """Release all window pages of a lease."""
        self._give_back(lease, len(lease.pages))

    def give_up(self, pages: Sequence[int]) -> None:
        """Release the window pages of held pages that a lease releases."""
        self.pages.release([self.beside[page] for page in pages])
        for page in pages:
            self.beside[page] = NO_WINDOW_PAGE

    def drop(self, pages: Sequence[int]) -> None:
        """Free the window pages of pages that the tree evicts."""
        for page in pages:
            if self.beside[page] != NO_WINDOW_PAGE:
                self._drop_idle(page)

    def evict(self, count: int) -> None:
        """Free this many window pages of cached pages, or all that no lease uses, in order of eviction."""
        for _ in range(min(count, len(self.idle))):
            self._drop_idle(next(iter(self.idle)))

    # -- inside --

    def _use(self, page: int) -> None:
        window_page = self.beside[page]
        self.idle.pop(page, None)
        self.users[window_page] += 1

    def _give_back(self, lease: Lease, end: int) -> None:
        """Release the window pages of a lease before index ``end``.

        The last first, so that the end of an unused prefix is evicted before its beginning.
        """
        for place in range(end - 1, lease.window_start - 1, -1):
            page = lease.pages[place]
            window_page = self.beside[page]
            if place >= lease.cached_pages:
                self.pages.release((window_page,))
                self.beside[page] = NO_WINDOW_PAGE
                continue
            if self.users[window_page] < 1:
                raise IntegrityError(f"window page {window_page} is released by {lease.rid}, but no lease uses it")
            self.users[window_page] -= 1
            if not self.users[window_page]:
                self.idle[page] = None

    def _drop_idle(self, page: int) -> None:
        if page not in self.idle:
            raise IntegrityError(f"page {page} leaves the tree, but its window page {self.beside[page]} is in use")
        del self.idle[page]
        self.pages.evict((self.beside[page],))
        self.beside[page] = NO_WINDOW_PAGE
