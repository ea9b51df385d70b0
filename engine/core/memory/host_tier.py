"""The host tier: pages of KV that left the page pool, kept in host memory until they are copied back.

Pure bookkeeping for each page: its place, its next copy, and its copy in flight. Moves no bytes and decides neither
order nor time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine.core.errors import IntegrityError
from engine.core.limits import Limits
from engine.core.memory.cache_log import CacheLog
from engine.core.memory.node import PLAIN, KvKey, page_keys
from engine.core.memory.pages import PagePool

# The source and the target page of a copy.
_Pairs = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class HostPage:
    """A used page of host memory.

    ``source`` is the page of the pool to copy, None once that copy is launched. A page that ``is_ready``, its copy
    completed, may be hit. ``readers`` counts the copies from it that are due or in flight.
    """

    number: int
    key: bytes
    source: int | None
    is_ready: bool = False
    readers: int = 0

    @property
    def may_go(self) -> bool:
        """Return whether no copy in flight writes it, and no copy, due or in flight, reads it."""
        return not self.readers and (self.is_ready or self.source is not None)


class HostTier:
    """``pages`` has the state of each page of host memory: free, to be written (held), or ready (cached).

    ``kept`` has the pages in use by key, least recently used first. The next microbatch writes back the pages that
    left the page pool, before others are computed in their place; the microbatch that uses a hit page loads it.
    """

    def __init__(self, *, total_pages: int, page_size: int) -> None:
        self.pages = PagePool(total_pages, page_size)
        self._page_size = page_size
        self.kept: dict[bytes, HostPage] = {}
        # The used pages, by number.
        self._numbered: dict[int, HostPage] = {}
        self._due_out: dict[int, HostPage] = {}
        self._due_in: list[tuple[int, int]] = []
        self.log: CacheLog | None = None

    @classmethod
    def of(cls, limits: Limits) -> HostTier | None:
        """Return the empty host tier of an engine, or None without one."""
        if not limits.host_pages:
            return None
        return cls(total_pages=limits.host_pages, page_size=limits.page_size)

    def reset(self) -> None:
        """Drop every page and every due copy."""
        self.pages.reset()
        self.kept.clear()
        self._numbered.clear()
        self._due_out.clear()
        self._due_in.clear()

    # -- reading --

    def match(self, ids: Sequence[int], start: int, kv_key: KvKey = PLAIN) -> list[HostPage]:
        """Return the ready pages that continue a cached prefix of ``start`` pages of ``ids``."""
        found: list[HostPage] = []
        if self.kept:
            for key in itertools.islice(page_keys(ids, self._page_size, kv_key), start, None):
                page = self.kept.get(key)
                if page is None or not page.is_ready:
                    break
                found.append(page)
        return found

    def page_numbered(self, number: int) -> HostPage:
        """Return the used page with this number."""
        page = self._numbered.get(number)
        if page is None:
            raise IntegrityError(f"host page {number} is copied, but is not in use")
        return page

    # -- pages that leave the pool --

    def keep(self, ids: Sequence[int], pages: Sequence[int], kv_key: KvKey) -> None:
        """Keep ``pages``, the last pages of the prefix ``ids``, as they leave the tree, the last page first."""
        keys = list(itertools.islice(page_keys(ids, self._page_size, kv_key), len(ids) // self._page_size))
        for key, source in zip(reversed(keys), reversed(pages), strict=False):
            self._keep(key, source)

    def _keep(self, key: bytes, source: int) -> None:
        known = self.kept.pop(key, None)
        if known is not None:
            self.kept[key] = known
            return
        if not self.pages.free:
            self._make_room()
        if self.pages.free:
            number = self.pages.allocate(1)[0]
            self.kept[key] = self._numbered[number] = self._due_out[number] = HostPage(number, key, source)

    def _make_room(self) -> None:
        """Drop the least recently used page without a copy, if any."""
        page = next((page for page in self.kept.values() if page.may_go), None)
        if page is not None:
            self._forget(page)

    def _forget(self, page: HostPage) -> None:
        del self.kept[page.key]
        del self._numbered[page.number]
        if page.is_ready:
            self.pages.evict((page.number,))
            if self.log is not None:
                self.log.removed_from_host(page.key)
        else:
            self._due_out.pop(page.number, None)
            self.pages.release((page.number,))

    # -- pages that return --

    def protect(self, found: Iterable[HostPage]) -> None:
        """Protect pages that a copy will read: no other page replaces them before it is complete."""
        for page in found:
            page.readers += 1

    def load(self, found: Sequence[HostPage], pages: Sequence[int]) -> None:
        """Copy protected pages to these pages of the pool, with the next microbatch."""
        for page in reversed(found):
            self.kept[page.key] = self.kept.pop(page.key)
        self._due_in += [(page.number, target) for page, target in zip(found, pages, strict=True)]

    # -- copies --

    @property
    def due_in(self) -> Sequence[tuple[int, int]]:
        """Return the copies to the pool that are not launched, as pairs of a host page and a page of the pool."""
        return self._due_in

    @property
    def due_out(self) -> Sequence[int]:
        """Return the host pages that copies not yet launched will write."""
        return tuple(self._due_out)

    @property
    def has_due(self) -> bool:
        """Return whether the next microbatch has copies."""
        return bool(self._due_out or self._due_in)

    def launch(self) -> tuple[_Pairs, _Pairs]:
        """Return the due copies to and from the host for the microbatch that is launched now.

        Copies to the host come first: the copies from it may write the pages that they free.
        """
        out = []
        for page in self._due_out.values():
            assert page.source is not None, f"{page} is written twice"
            out.append((page.source, page.number))
            page.source = None
        into = tuple(self._due_in)
        self._due_out.clear()
        self._due_in.clear()
        return tuple(out), into

    def land(self, out: _Pairs, into: _Pairs, *, failed: bool) -> None:
        """End the copies of a completed microbatch: its written pages are ready, or dropped if it failed."""
        for number, _ in into:
            page = self.page_numbered(number)
            if page.readers < 1:
                raise IntegrityError(f"host page {number} was read by more copies than were launched")
            page.readers -= 1
        for _, number in out:
            page = self.page_numbered(number)
            if failed:
                self._forget(page)
                continue
            self.pages.cache((number,))
            page.is_ready = True
            if self.log is not None:
                self.log.stored_on_host(page.key)

    def become(self, kept: Iterable[HostPage]) -> None:
        """Restore these pages, least recently used first, into an empty tier."""
        for page in kept:
            self.pages.hold((page.number,))
            if page.is_ready:
                self.pages.cache((page.number,))
            else:
                self._due_out[page.number] = page
            self.kept[page.key] = self._numbered[page.number] = page
