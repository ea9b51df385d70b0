"""The window pool: the KV of the layers that see only the last ``window_tokens`` tokens of a request.

A page that a request holds or the tree caches may have a *twin* here, for the same tokens. A request gives a twin back
once nothing that can still be computed sees it, long before its page. It decides nothing about order or time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.errors import IntegrityError
from engine.limits import Limits
from engine.memory.lease import Lease
from engine.memory.pages import PagePool, PageState

__all__ = ["NO_TWIN", "SlidingWindowPool"]

NO_TWIN: Final = -1


class SlidingWindowPool:
    """``pages`` are the window pages; ``users`` counts, for each that the tree caches, the leases that may read it.

    A held page of a lease has a twin exactly from the lease's ``window_start`` on. A cached page may have lost its
    twin, because nobody used it and somebody needed the room: then no prefix that needs it can be matched.
    ``row_pages`` is what one request can use at once.
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
        """The empty window pool of an engine; None for a model without window layers."""
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
        """Forget every twin and every user."""
        self.pages.reset()
        self._twins = [NO_TWIN] * self._total_pages
        self.users = [0] * self.pages.total
        # Pages of the tree whose twins nobody uses, in the order in which they are evicted.
        self._idle: dict[int, None] = {}

    # -- looking --

    @property
    def available_pages(self) -> int:
        """Window pages that are free or could be, by evicting what nobody uses."""
        return self.pages.free + len(self._idle)

    def first_page(self, position: int) -> int:
        """The first of a request's pages that a query at this position, or at a later one, can see."""
        return max(0, (position - self._window_tokens + 1) // self._page_size)

    def twins_of(self, lease: Lease, start: int) -> tuple[int, ...]:
        """The window pages beside ``lease.pages[start:]``; NO_TWIN for those that are not the lease's to read."""
        twins, first = self._twins, max(start, lease.window_start)
        return (NO_TWIN,) * (first - start) + tuple([twins[page] for page in lease.pages[first:]])

    def usable_pages(self, pages: Sequence[int]) -> int:
        """How many pages of a cached prefix a request can go on behind: all that it would see must be there still."""
        missing = usable = 0
        for count, page in enumerate(pages, 1):
            if self._twins[page] == NO_TWIN:
                missing = count
            if self.first_page(count * self._page_size) >= missing:
                usable = count
        return usable

    def need(self, pages: int, *, cached: int = 0) -> int:
        """Window pages that a request of so many pages still takes, at most, when it begins behind a cached prefix."""
        seen = cached - self.first_page(cached * self._page_size)
        return min(pages - cached + seen, self._row_pages) - seen

    def available_pages_without(self, leases: Sequence[Lease]) -> int:
        """Window pages that would be available if these leases were released."""
        used: dict[int, int] = {}
        for lease in leases:
            for page in lease.pages[lease.window_start :]:
                used[self._twins[page]] = used.get(self._twins[page], 0) + 1
        return self.available_pages + sum(self.users[twin] in (0, count) for twin, count in used.items())

    def snapshot(self) -> tuple[tuple[int, int], ...]:
        """Every page with a twin, and its twin, in the order of eviction; only while nobody uses one."""
        return tuple([(page, self._twins[page]) for page in self._idle])

    def restore(self, twins: Sequence[tuple[int, int]]) -> None:
        """Become what a snapshot says. Only for a pool that is empty."""
        pages = [twin for _, twin in twins]
        self.pages.hold(pages)
        self.pages.cache(pages)
        for page, twin in twins:
            self._twins[page] = twin
            self._idle[page] = None

    # -- the life of a lease --

    def attach(self, lease: Lease) -> None:
        """Protect what a new lease sees of its cached prefix."""
        lease.window_start = self.first_page(len(lease.pages) * self._page_size)
        for page in lease.pages[lease.window_start :]:
            self._use(page)

    def add(self, pages: Sequence[int]) -> None:
        """Give each of a lease's new pages a twin. The caller has asked ``available_pages`` before."""
        self._evict(len(pages) - self.pages.free)
        for page, twin in zip(pages, self.pages.allocate(len(pages)), strict=True):
            self._twins[page] = twin

    def slide(self, lease: Lease, position: int) -> bool:
        """Give back what no query from ``position`` on sees; everything before it is computed and back.

        True if there was something to give back.
        """
        first = min(self.first_page(position), len(lease.pages))
        if first <= lease.window_start:
            return False
        self._give_back(lease, first)
        lease.window_start = first
        return True

    def publish(self, own: int, cached: int) -> None:
        """A lease's page was handed over to the tree, or given up in favour of the tree's own: so is its twin.

        A twin that the tree has lost is replaced.
        """
        twin = self._twins[own]
        if twin == NO_TWIN:
            return
        if own != cached:
            self._twins[own] = NO_TWIN
            if self._twins[cached] != NO_TWIN:
                self.pages.release((twin,))
                self._use(cached)
                return
            self._twins[cached] = twin
        self.pages.cache((twin,))
        self.users[twin] = 1

    def release(self, lease: Lease) -> None:
        """Give back all twins of a lease."""
        self._give_back(lease, len(lease.pages))

    def drop(self, pages: Sequence[int]) -> None:
        """The tree evicts these pages: their twins go with them."""
        for page in pages:
            if self._twins[page] != NO_TWIN:
                self._drop_idle(page)

    # -- the books --

    def check_lease(self, lease: Lease) -> None:
        """The twins of one live lease: there from its window on, held or cached as their pages are, else given back."""
        twins = [self._twins[page] for page in lease.pages]
        start, cached = lease.window_start, lease.cached_pages
        shared, own = twins[start:cached], twins[max(start, cached) :]
        if NO_TWIN in shared or NO_TWIN in own or any(twin != NO_TWIN for twin in twins[cached:start]):
            raise IntegrityError(f"{lease} has window pages {twins}, but must have all from place {start} on")
        if not self.pages.all_are(PageState.CACHED, shared) or not self.pages.all_are(PageState.HELD, own):
            raise IntegrityError(f"{lease} uses window pages {shared} of the tree and {own} of its own, not so booked")

    def check_node(self, pages: Sequence[int]) -> None:
        """The twins of a node's pages are the tree's, and idle exactly while nobody uses them."""
        for page in pages:
            twin = self._twins[page]
            if twin == NO_TWIN:
                continue
            if self.pages.state(twin) is not PageState.CACHED or (page in self._idle) is (self.users[twin] > 0):
                raise IntegrityError(
                    f"window page {twin} beside page {page} of the tree is {self.pages.state(twin).name} with "
                    f"{self.users[twin]} users, {'idle' if page in self._idle else 'not idle'}"
                )

    def check_users(self, used: dict[int, int]) -> None:
        """``used`` counts the live leases that use each window page of the tree."""
        for twin, count in used.items():
            if self.users[twin] != count:
                raise IntegrityError(f"window page {twin} has {self.users[twin]} users, but {count} leases use it")

    def check_sums(self, *, held: int, used: int) -> None:
        """Leases hold ``held`` window pages and use ``used`` of the tree's: with the idle ones that is all there is."""
        pages = self.pages
        booked = pages.free + pages.held + pages.cached + pages.reserved
        if (held, used + len(self._idle), booked) != (pages.held, pages.cached, pages.total):
            raise IntegrityError(
                f"leases hold {held} window pages and use {used} of the tree's, {len(self._idle)} are idle, "
                f"but booked is {pages}"
            )

    def check_integrity(self) -> None:
        """Every window page that is not free is the twin of one page."""
        self.pages.check_integrity()
        twins = [twin for twin in self._twins if twin != NO_TWIN]
        if len(set(twins)) != len(twins) or len(twins) != self.pages.held + self.pages.cached:
            raise IntegrityError(f"the window pages {sorted(twins)} are beside pages, but booked is {self.pages}")

    def used_by(self, lease: Lease) -> tuple[list[int], int]:
        """The window pages of the tree that a lease uses, and how many others it holds."""
        used = [self._twins[page] for page in lease.pages[lease.window_start : lease.cached_pages]]
        return used, len(lease.pages) - max(lease.window_start, lease.cached_pages)

    # -- inside --

    def _use(self, page: int) -> None:
        twin = self._twins[page]
        self._idle.pop(page, None)
        self.users[twin] += 1

    def _give_back(self, lease: Lease, end: int) -> None:
        """Give back the twins of a lease's pages before place ``end``.

        The last first, so that of a prefix nobody uses the end is evicted before the beginning.
        """
        for place in range(end - 1, lease.window_start - 1, -1):
            page = lease.pages[place]
            twin = self._twins[page]
            if place >= lease.cached_pages:
                self.pages.release((twin,))
                self._twins[page] = NO_TWIN
                continue
            if self.users[twin] < 1:
                raise IntegrityError(f"window page {twin} is given back by {lease.rid}, but nobody uses it")
            self.users[twin] -= 1
            if not self.users[twin]:
                self._idle[page] = None

    def _evict(self, count: int) -> None:
        for _ in range(count):
            self._drop_idle(next(iter(self._idle)))

    def _drop_idle(self, page: int) -> None:
        if page not in self._idle:
            raise IntegrityError(f"page {page} leaves the tree, but its window page {self._twins[page]} is in use")
        del self._idle[page]
        self.pages.evict((self._twins[page],))
        self._twins[page] = NO_TWIN
