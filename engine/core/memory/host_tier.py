"""The second tier: pages of KV that left the page pool, kept in host memory until they are copied back.

Pure bookkeeping, by page: where each is, which are to be copied next, and which a copy in flight uses. Moves no bytes
and decides nothing about order or time.
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

# Which page is copied, and to which one.
_Pairs = tuple[tuple[int, int], ...]


@dataclass(slots=True, eq=False)
class HostPage:
    """A page of host memory that is in use.

    ``source`` is the page of the pool that it is to be copied from, None once that copy is launched. It may be hit when
    it ``is_ready``: the copy's result is back. ``readers`` counts the copies from it that are due or in flight.
    """

    number: int
    key: bytes
    source: int | None
    is_ready: bool = False
    readers: int = 0

    @property
    def may_go(self) -> bool:
        """No copy in flight writes it, and none that is due or in flight reads it."""
        return not self.readers and (self.is_ready or self.source is not None)


class HostTier:
    """``pages`` tells of each page of host memory whether it is free, to be written (held), or ready (cached).

    ``kept`` has the pages in use by key, least recently used first. The next microbatch writes back the pages that left
    the page pool, before anything can be computed in their place; the microbatch that uses a hit page loads it.
    """

    def __init__(self, *, total_pages: int, page_size: int) -> None:
        self.pages = PagePool(total_pages, page_size)
        self._page_size = page_size
        self.kept: dict[bytes, HostPage] = {}
        # By number, those in use.
        self._numbered: dict[int, HostPage] = {}
        self._due_out: dict[int, HostPage] = {}
        self._due_in: list[tuple[int, int]] = []
        self.log: CacheLog | None = None

    @classmethod
    def of(cls, limits: Limits) -> HostTier | None:
        """The empty second tier of an engine; None for one that has none."""
        if not limits.host_pages:
            return None
        return cls(total_pages=limits.host_pages, page_size=limits.page_size)

    def reset(self) -> None:
        """Forget every page, and every copy that is due."""
        self.pages.reset()
        self.kept.clear()
        self._numbered.clear()
        self._due_out.clear()
        self._due_in.clear()

    # -- looking --

    def match(self, ids: Sequence[int], start: int, kv_key: KvKey = PLAIN) -> list[HostPage]:
        """The pages that continue a cached prefix of ``start`` pages of ``ids``, as far as they are ready."""
        found: list[HostPage] = []
        if self.kept:
            for key in itertools.islice(page_keys(ids, self._page_size, kv_key), start, None):
                page = self.kept.get(key)
                if page is None or not page.is_ready:
                    break
                found.append(page)
        return found

    def page_numbered(self, number: int) -> HostPage:
        """The page in use that has this number."""
        page = self._numbered.get(number)
        if page is None:
            raise IntegrityError(f"host page {number} is copied, but it is not in use")
        return page

    # -- what leaves the page pool --

    def keep(self, ids: Sequence[int], pages: Sequence[int], kv_key: KvKey) -> None:
        """``pages``, the last ones of the prefix ``ids``, leave the tree: the last one first."""
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
        """Forget the least recently used page that no copy uses, if there is one."""
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

    # -- what comes back --

    def protect(self, found: Iterable[HostPage]) -> None:
        """These pages are about to be read. Nothing may take their place until the copy is back."""
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
        """Copies to the pool that are not launched: pairs of a host page and a page of the pool."""
        return self._due_in

    @property
    def due_out(self) -> Sequence[int]:
        """The host pages that are to be written, by copies that are not launched."""
        return tuple(self._due_out)

    @property
    def has_due(self) -> bool:
        """Whether something is to be copied by the next microbatch."""
        return bool(self._due_out or self._due_in)

    def launch(self) -> tuple[_Pairs, _Pairs]:
        """The copies that are due, to host pages and from them: the microbatch that is launched now carries them out.

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
        """End the copies of a microbatch that is back. The pages that it wrote are ready, or dropped if it failed."""
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
        """Hold these pages, least recently used first. Only for an empty tier."""
        for page in kept:
            self.pages.hold((page.number,))
            if page.is_ready:
                self.pages.cache((page.number,))
            else:
                self._due_out[page.number] = page
            self.kept[page.key] = self._numbered[page.number] = page
