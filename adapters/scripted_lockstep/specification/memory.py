"""Memory of the executable specification: rows, pages and the prefix cache, counted again at each query.

Names in bold are the rules of docs/rules.md. This module knows neither the order of requests nor time nor the numbers
of pages and rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.core.limits import Limits
from engine.core.messages import EvictCache, OperatorEvent, ReleasePressure, SetPressure
from scripted_lockstep.specification.host_tier import SpecifiedHostTier
from scripted_lockstep.specification.request import Page, SpecifiedKey, SpecifiedRequest
from scripted_lockstep.specification.window import SpecifiedWindow


class SpecifiedMemory:
    """All rows and pages of an engine. ``owners`` are the requests that own some of them, ended or not.

    ``cache`` is the root above all cached pages, ``window`` the window pool of a model with window layers, ``host`` the
    second tier, None without one. ``evictions`` counts the calls that asked for an eviction.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.window = SpecifiedWindow(limits) if limits.window_tokens else None
        self.host = SpecifiedHostTier(limits) if limits.host_pages else None
        self.cache, self._pins = Page(None, ()), list[Page]()
        self._uses = 0
        self.owners: list[SpecifiedRequest] = []
        self.cached_pages = self.reserved_pages = self.reserved_rows = self.evictions = 0

    # -- sizes --

    @property
    def free_rows(self) -> int:
        """The rows that are neither owned nor reserved."""
        return self._limits.rows - self.reserved_rows - len(self.owners)

    @property
    def free_pages(self) -> int:
        """Pages that are neither held by a request nor cached nor reserved."""
        return self._limits.total_pages - self.reserved_pages - self.cached_pages - _held_by(self.owners)

    def sizes(self) -> dict[str, int]:
        """**Counters** of pages and rows. Reserved ones count as held."""
        limits, held = self._limits, _held_by(self.owners) + self.reserved_pages
        return {
            "pages_total": limits.total_pages, "pages_free": limits.total_pages - self.cached_pages - held,
            "pages_cached": self.cached_pages, "pages_held": held, "page_size": limits.page_size,
            "rows_total": limits.rows, "rows_free": self.free_rows,
            **({} if self.host is None else self.host.sizes()),
        }  # fmt: skip

    def available_pages(self, owners: Sequence[SpecifiedRequest], hit: Sequence[Page] = ()) -> int:
        """Pages that are free, or cached and unused, if ``owners`` owned all memory in use and ``hit`` were used."""
        used = self._used_by(owners).union(hit)
        return self._limits.total_pages - self.reserved_pages - _held_by(owners) - len(used)

    def pages_for(self, tokens: int) -> int:
        """Return the number of pages that this many tokens take."""
        return -(-tokens // self._limits.page_size)

    def has_room(
        self, tokens: int, spare_pages: int, owners: Sequence[SpecifiedRequest], hit: Sequence[Page] = ()
    ) -> bool:
        """**Room**: for these tokens and spare pages beside the hit, if ``owners`` owned all memory in use."""
        pages = self.pages_for(tokens)
        return pages - len(hit) + spare_pages <= self.available_pages(owners, hit) and (
            self.window is None
            or self.window.need(pages, hit) + spare_pages <= self.window.available_pages(owners, hit)
        )

    def pending_tokens(self, waiting: Sequence[SpecifiedRequest], split: SpecifiedRequest | None) -> int:
        """**Load**: the unlaunched rest of the split prompt, and the tokens that waiting requests would not hit."""
        parked = 0 if split is None else split.goal_tokens - split.planned_tokens
        if not waiting:
            return parked
        return parked + sum([len(one.ids) - self.hit_pages(one) * self._limits.page_size for one in waiting])

    # -- the prefix cache --

    def match_of(self, request: SpecifiedRequest) -> Sequence[Page]:
        """**Hit**: the prefix that this request hits."""
        return self.match(request.ids[: request.may_hit + 1], request.kv_key)

    def match(self, ids: Sequence[int], kv_key: SpecifiedKey = (0, 0)) -> Sequence[Page]:
        """**Hit**: the longest prefix in full pages of the same LoRA and salt, never with the last token.

        The part that windows see must be cached too.
        """
        size, page = self._limits.page_size, self.cache
        hit: list[Page] = []
        for start in range(0, len(ids) - size, size) if self._limits.radix_cache else ():
            below = page.below.get((kv_key, *ids[start : start + size]))
            if below is None:
                break
            page = below
            hit.append(page)
        return hit if self.window is None else self.window.usable(hit)

    def use(self, prefix: Sequence[Page]) -> None:
        """**Use**: note the use of a whole prefix, at each attempt to admit and each publication."""
        self._uses += 1
        for page in prefix:
            page.used = self._uses
        if prefix:
            prefix[-1].ends_node = True

    def publish(self, request: SpecifiedRequest, tokens: int, *, counts: bool = True) -> None:
        """**Publish**: move full pages to the cache; a page that the cache already has is freed."""
        size, prefix = self._limits.page_size, request.prefix
        if not self._limits.radix_cache:
            return
        for index in range(len(prefix), tokens // size):
            above, key = (
                prefix[-1] if prefix else self.cache,
                (request.kv_key, *request.ids[index * size : (index + 1) * size]),
            )
            if key in above.below:
                request.known_pages = min(request.known_pages, index)
            else:
                above.below[key] = Page(above, key)
                above.ends_node = (
                    above.ends_node or above.used > 0
                )  # The page was cached before, and this request leaves it.
                self.cached_pages += 1
            prefix.append(above.below[key])
            if self.window is not None and index >= request.window_start:
                self.window.beside.setdefault(prefix[-1])
        for page in prefix:
            page.hits += counts
        self.use(prefix)

    def admit(self, request: SpecifiedRequest, spare_pages: int) -> bool:
        """Admit a request if all of its tokens have room: it gets a row and the pages that it hits. Returns whether."""
        hit, window, tokens, host = self.match_of(request), self.window, len(request.ids), self.host
        self.use(hit)
        if not self.has_room(tokens, spare_pages, self.owners, hit):
            if window is not None and self.pages_for(tokens) - len(hit) + spare_pages <= self.available_pages(
                self.owners, hit
            ):
                window.leave(window.seen_of(hit))  # The engine takes the pages before it looks for window pages.
            return False
        self.owners.append(request)
        request.owns_memory, request.prefix, request.pages, request.known_pages = True, list(hit), len(hit), 0
        request.window_start = 0 if window is None else len(hit) - len(window.seen_of(hit))
        if host is not None:
            found = self.on_host(request)
            host.protect(found)
            self.extend(request, (len(hit) + len(found)) * self._limits.page_size)
            host.load(found)
        return True

    def extend(self, request: SpecifiedRequest, tokens: int) -> bool:
        """Give a request pages for this many tokens. Returns False, and changes nothing, if there are not enough."""
        need, window = self.pages_for(tokens) - request.pages, self.window
        if need > 0:
            short = need - self.free_pages
            if short > 0 and need > self.available_pages(self.owners):
                return False
            if window is not None and need > window.available_pages(self.owners):
                return False
            self.evict(short)
            if window is not None:
                window.evict(need - window.free_pages(self.owners), self.owners)
            request.pages += need
        return True

    def free_tokens(self, request: SpecifiedRequest, *, spare_pages: int) -> int:
        """Return how many tokens the request's pages and the free pages have room for, except ``spare_pages``."""
        window = self.window
        free = self.free_pages if window is None else min(self.free_pages, window.free_pages(self.owners))
        return (request.pages + max(0, free - spare_pages)) * self._limits.page_size

    def trim(self, request: SpecifiedRequest) -> None:
        """Free the pages of a request behind its planned tokens."""
        request.pages = self.pages_for(request.planned_tokens)
        request.known_pages = min(request.known_pages, request.pages)

    def evict(self, count: int) -> None:
        """**Evict**: free the least recently used pages, a prefix from its end, and never a page in use."""
        if count <= 0:
            return
        self.evictions += 1
        for page in sorted(self._idle_pages(), key=lambda page: (page.used, -page.depth))[:count]:
            assert page.above is not None, "the root of the cache is no page"
            del page.above.below[page.tokens]
            page.above.ends_node = True
            self.cached_pages -= 1
            if self.host is not None:
                self.host.keep(page)
            if self.window is not None:
                self.window.beside.pop(page, None)

    def slide(self, request: SpecifiedRequest, position: int) -> None:
        """**Slide**: free the window pages that the token at ``position`` and later tokens do not see."""
        if self.window is not None:
            start = max(request.window_start, min(self.window.first_page(position), request.pages))
            self.window.leave(request.prefix[request.window_start : start])
            request.window_start = start

    def release(self, request: SpecifiedRequest) -> None:
        """Free all memory of a request."""
        if self.window is not None:
            self.window.leave(request.prefix[request.window_start :])
        self.owners.remove(request)
        request.prefix, request.pages, request.known_pages, request.window_start = [], 0, 0, 0

    def flush(self) -> int:
        """Drop the cache and its pins. Returns the number of dropped pages."""
        dropped, self.cached_pages = self.cached_pages, 0
        self.cache, self._pins = Page(None, ()), []
        if self.window is not None:
            self.window.beside.clear()
        if self.host is not None:
            self.host.flush()
        return dropped

    # -- the second tier --

    def on_host(self, request: SpecifiedRequest) -> list[tuple[int, ...]]:
        """**Host hit**: the pages that this request would load."""
        if self.host is None:
            return []
        return self.host.hit(request.ids[: request.may_hit + 1], len(self.match_of(request)), request.kv_key)

    def hit_pages(self, request: SpecifiedRequest) -> int:
        """Count the pages that this request need not compute."""
        return len(self.match_of(request)) + len(self.on_host(request))

    def count_hit(self, request: SpecifiedRequest, totals: dict[str, int]) -> None:
        """**Cached tokens**: the hit at the first admission, and the part of it that is loaded from the host."""
        if not request.retractions:
            request.cached_tokens = request.hit_tokens
            request.cached_tokens_host = request.hit_tokens - len(request.prefix) * self._limits.page_size
            totals["cached_tokens"] += request.cached_tokens
            totals["host_hit_tokens"] += request.cached_tokens_host

    def launch_copies(self, number: int, totals: dict[str, int]) -> tuple[int, int]:
        """**Copies**: the pages that this microbatch copies to the host and from it; **Counters** count them."""
        written, read = (0, 0) if self.host is None else self.host.launch(number)
        totals["host_pages_written"] += written
        totals["host_pages_loaded"] += read
        return written, read

    def land_copies(self, number: int | None, *, failed: bool) -> None:
        """**Copies**: handle the result of this microbatch, or with None the loss of all of them."""
        if self.host is not None:
            self.host.land(number, failed=failed)

    # -- operators --

    def press(self, event: OperatorEvent) -> None:
        """**Pressure**: give back reserved memory, then evict cached pages, then reserve the excess."""
        if isinstance(event, EvictCache):
            self.evict(self.cached_pages if event.pages is None else event.pages)
        elif isinstance(event, ReleasePressure):
            self.reserved_pages, self.reserved_rows, self._pins = 0, 0, []
            if self.window is not None:
                self.window.reserved_pages = 0
        else:
            self._reserve(event)

    def _reserve(self, event: SetPressure) -> None:
        if event.leave_pages is not None:
            self.reserved_pages -= min(self.reserved_pages, max(0, event.leave_pages - self.free_pages))
            self.evict(event.leave_pages - self.free_pages)
            self.reserved_pages += max(0, self.free_pages - event.leave_pages)
        window = self.window
        if event.leave_window_pages is not None and window is not None:
            more = event.leave_window_pages - window.free_pages(self.owners)
            window.reserved_pages -= min(window.reserved_pages, max(0, more))
            window.evict(event.leave_window_pages - window.free_pages(self.owners), self.owners)
            window.reserved_pages += max(0, window.free_pages(self.owners) - event.leave_window_pages)
        if event.leave_rows is not None:
            self.reserved_rows -= min(self.reserved_rows, max(0, event.leave_rows - self.free_rows))
            self.reserved_rows += max(0, self.free_rows - event.leave_rows)
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
        """Yield cached pages that nothing uses: parents before children, siblings in order of publication."""
        used, stack = self._used_by(self.owners), [*reversed(self.cache.below.values())]
        while stack:
            page = stack.pop()
            if page not in used:
                yield page
            stack += reversed(page.below.values())


def _held_by(owners: Iterable[SpecifiedRequest]) -> int:
    return sum([owner.pages - len(owner.prefix) for owner in owners])
