"""The memory of the executable specification: rows, pages and the prefix cache, counted anew at each question.

Names in bold are the rules of docs/architecture.md, "The rules of a step". It decides nothing about order or time, and
does not know the numbers of pages and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.limits import Limits
from engine.messages import EvictCache, OperatorEvent, ReleasePressure, SetPressure
from scripted.checks.specified_request import Page, SpecifiedRequest

__all__ = ["SpecifiedMemory"]


class SpecifiedMemory:
    """All rows and pages of an engine. ``owners`` are the requests that own some of them, ended or not."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._cache, self._pins = Page(None, ()), list[Page]()
        self._uses = 0
        self.owners: list[SpecifiedRequest] = []
        self.cached_pages = self.kept_pages = self.kept_rows = 0

    # -- what there is --

    @property
    def free_rows(self) -> int:
        """Rows that requests can take."""
        return self._limits.rows - self.kept_rows - len(self.owners)

    @property
    def free_pages(self) -> int:
        """Pages that no request holds, that are not cached and not kept back."""
        return self._limits.total_pages - self.kept_pages - self.cached_pages - _held_by(self.owners)

    def sizes(self) -> dict[str, int]:
        """**Counters** of pages and rows. What is kept back counts as held."""
        limits, held = self._limits, _held_by(self.owners) + self.kept_pages
        return {
            "pages_total": limits.total_pages, "pages_free": limits.total_pages - self.cached_pages - held,
            "pages_cached": self.cached_pages, "pages_held": held, "page_size": limits.page_size,
            "rows_total": limits.rows, "rows_free": self.free_rows,
        }  # fmt: skip

    def available_pages(self, owners: Sequence[SpecifiedRequest], hit: Sequence[Page] = ()) -> int:
        """Pages that are free, or cached and of no use, if ``owners`` were all who own memory and ``hit`` were used."""
        used = self._used_by(owners).union(hit)
        return self._limits.total_pages - self.kept_pages - _held_by(owners) - len(used)

    def pages_for(self, tokens: int) -> int:
        """Pages that this many tokens take."""
        return -(-tokens // self._limits.page_size)

    # -- the prefix cache --

    def match(self, ids: Sequence[int]) -> list[Page]:
        """**Hit**: the longest cached prefix in full pages, never with the last token."""
        size, page = self._limits.page_size, self._cache
        hit: list[Page] = []
        for start in range(0, len(ids) - size, size) if self._limits.radix_cache else ():
            below = page.below.get(tuple(ids[start : start + size]))
            if below is None:
                break
            page = below
            hit.append(page)
        return hit

    def use(self, prefix: Sequence[Page]) -> None:
        """**Use**: a prefix is used as a whole, by every attempt to admit and by every publication."""
        self._uses += 1
        for page in prefix:
            page.used = self._uses
        if prefix:
            prefix[-1].ends_node = True

    def publish(self, request: SpecifiedRequest, tokens: int) -> None:
        """**Publish**: its full pages go to the cache; of a page that is there already, its own is given back."""
        size, prefix = self._limits.page_size, request.prefix
        if not self._limits.radix_cache:
            return
        for index in range(len(prefix), tokens // size):
            above, key = prefix[-1] if prefix else self._cache, tuple(request.ids[index * size : (index + 1) * size])
            if key in above.below:
                request.told_pages = min(request.told_pages, index)
            else:
                above.below[key] = Page(above, key)
                above.ends_node = (
                    above.ends_node or above.used > 0
                )  # A page that was there before, where this leaves it.
                self.cached_pages += 1
            prefix.append(above.below[key])
        self.use(prefix)

    def extend(self, request: SpecifiedRequest, tokens: int) -> bool:
        """Give a request the pages for this many tokens; False, and nothing done, when there are not enough."""
        need = self.pages_for(tokens) - request.pages
        if need > 0:
            short = need - self.free_pages
            if short > 0 and need > self.available_pages(self.owners):
                return False
            self.evict(short)
            request.pages += need
        return True

    def free_tokens(self, request: SpecifiedRequest, *, spare_pages: int) -> int:
        """Tokens that a request could have pages for from what is free, but for some pages."""
        return (request.pages + max(0, self.free_pages - spare_pages)) * self._limits.page_size

    def trim(self, request: SpecifiedRequest) -> None:
        """Take the pages after its planned tokens from a request."""
        request.pages = self.pages_for(request.planned_tokens)
        request.told_pages = min(request.told_pages, request.pages)

    def evict(self, count: int) -> None:
        """**Evict**: least recently used first, of one prefix its end first, never what is in use."""
        if count <= 0:
            return
        for page in sorted(self._idle_pages(), key=lambda page: (page.used, -page.depth))[:count]:
            assert page.above is not None, "the root of the cache is no page"
            del page.above.below[page.tokens]
            page.above.ends_node = True
            self.cached_pages -= 1

    def release(self, request: SpecifiedRequest) -> None:
        """Take everything from a request."""
        self.owners.remove(request)
        request.prefix, request.pages, request.told_pages = [], 0, 0

    def flush(self) -> int:
        """Forget the cache and what of it an operator pinned; returns how many pages it had."""
        dropped, self.cached_pages = self.cached_pages, 0
        self._cache, self._pins = Page(None, ()), []
        return dropped

    # -- operators --

    def press(self, event: OperatorEvent) -> None:
        """**Pressure**: what is kept back is given back, then cache is evicted; what is too much is kept back."""
        if isinstance(event, EvictCache):
            self.evict(self.cached_pages if event.pages is None else event.pages)
        elif isinstance(event, ReleasePressure):
            self.kept_pages, self.kept_rows, self._pins = 0, 0, []
        else:
            self._keep(event)

    def _keep(self, event: SetPressure) -> None:
        if event.leave_pages is not None:
            self.kept_pages -= min(self.kept_pages, max(0, event.leave_pages - self.free_pages))
            self.evict(event.leave_pages - self.free_pages)
            self.kept_pages += max(0, self.free_pages - event.leave_pages)
        if event.leave_rows is not None:
            self.kept_rows -= min(self.kept_rows, max(0, event.leave_rows - self.free_rows))
            self.kept_rows += max(0, self.free_rows - event.leave_rows)
        if event.leave_unlocked is not None:
            self._pins = []
            nodes = [page for page in self._idle_pages() if page.ends_node]
            self._pins = nodes[: max(0, len(nodes) - event.leave_unlocked)]

    # -- inside --

    def _used_by(self, owners: Sequence[SpecifiedRequest]) -> set[Page]:
        used = {page for owner in owners for page in owner.prefix}
        for page in self._pins:
            while page.above is not None:
                used.add(page)
                page = page.above
        return used

    def _idle_pages(self) -> Iterator[Page]:
        """Cached pages that nothing uses: those above before those below, neighbours in order of publication."""
        used, stack = self._used_by(self.owners), [*reversed(self._cache.below.values())]
        while stack:
            page = stack.pop()
            if page not in used:
                yield page
            stack += reversed(page.below.values())


def _held_by(owners: Iterable[SpecifiedRequest]) -> int:
    return sum([owner.pages - len(owner.prefix) for owner in owners])
