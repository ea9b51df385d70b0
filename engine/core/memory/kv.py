"""The memory of requests: page pool, rows and prefix tree, and the one place that frees a request's memory.

Decides nothing about order or time. A request takes a lease at admission, extends it chunk by chunk, publishes its
confirmed tokens, and releases the lease once.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.errors import IntegrityError
from engine.core.limits import Limits
from engine.core.memory.cache_log import CacheLog
from engine.core.memory.host_tier import HostPage, HostTier
from engine.core.memory.lease import Lease
from engine.core.memory.node import PLAIN, KvKey, Node
from engine.core.memory.pages import PagePool
from engine.core.memory.radix import RadixTree
from engine.core.memory.sliding_window import SlidingWindowPool


class KVMemory:
    """``pages``, ``rows`` and ``tree`` of one engine, and ``sliding_window`` if its model has window layers.

    ``host`` is the host tier, None for an engine without one. ``log`` has the changes of the cache, if they are
    published.
    """

    def __init__(
        self,
        *,
        total_pages: int,
        page_size: int,
        rows: int,
        radix_cache: bool,
        sliding_window: SlidingWindowPool | None = None,
        host: HostTier | None = None,
        log: CacheLog | None = None,
    ) -> None:
        self.pages = PagePool(total_pages, page_size)
        self.rows = PagePool(rows, unit="row")
        self.sliding_window = sliding_window
        self.host = host
        self.tree = RadixTree(self.pages, sliding_window, host)
        self.log = self.tree.log = log
        if host is not None:
            host.log = log
        self._page_size = page_size
        self._radix_cache = radix_cache

    @classmethod
    def of(cls, limits: Limits) -> KVMemory:
        """Return the empty memory of an engine."""
        return cls(
            total_pages=limits.total_pages,
            page_size=limits.page_size,
            rows=limits.rows,
            radix_cache=limits.radix_cache,
            sliding_window=SlidingWindowPool.of(limits),
            host=HostTier.of(limits),
            log=CacheLog(limits.page_size) if limits.kv_events else None,
        )

    @property
    def available_pages(self) -> int:
        """Free and unlocked cached pages."""
        return self.pages.free + self.tree.evictable_pages

    def available_pages_without(self, leases: Sequence[Lease]) -> int:
        """Return the pages available after a release of these leases. A prefix that other leases lock stays."""
        locks: dict[Node, int] = {}
        for lease in leases:
            for node in self.tree.path(lease.node):
                locks[node] = locks.get(node, 0) + 1
        unlocked = sum(len(node.pages) for node, count in locks.items() if node.lock_ref == count)
        return self.available_pages + unlocked + sum(len(lease.pages) - lease.cached_pages for lease in leases)

    def has_room(self, tokens: int, *, spare_pages: int, without: Sequence[Lease] = ()) -> bool:
        """Return whether this many tokens fit after a release of these leases, with pages to spare."""
        pages = self.pages_for(tokens)
        if pages + spare_pages > self.available_pages_without(without):
            return False
        window = self.sliding_window
        return window is None or window.need(pages) + spare_pages <= window.available_pages_without(without)

    def pages_for(self, tokens: int) -> int:
        """Return the pages of this many tokens."""
        return -(-tokens // self._page_size)

    def cacheable_tokens(self, tokens: int) -> int:
        """Return the number of tokens in full pages, which the tree caches."""
        return tokens // self._page_size * self._page_size if self._radix_cache else 0

    def cached_tokens(self, ids: Sequence[int], hit_limit: int | None = None, kv_key: KvKey = PLAIN) -> int:
        """Return the tokens of a prompt that tree and host can serve, see ``admit``. Changes nothing."""
        if not self._radix_cache:
            return 0
        most = _most_hit(ids, hit_limit)
        if self.sliding_window is None:
            # Avoids a copy of the prompt, which may be long.
            pages = min(self.tree.match_length(ids, kv_key), most) // self._page_size
            return (pages + len(self._on_host(ids, pages, most, kv_key))) * self._page_size
        return len(self._usable(ids[:most], self.sliding_window, kv_key))

    def cached_nodes(
        self, ids: Sequence[int], hit_limit: int | None = None, kv_key: KvKey = PLAIN
    ) -> list[tuple[int, int]]:
        """Return the nodes of the tree that can serve a prompt, each with its matching pages."""
        if not self._radix_cache:
            return []
        window, prefix = self.sliding_window, ids[: _most_hit(ids, hit_limit)]
        return self.tree.match_nodes(prefix if window is None else self._usable(prefix, window, kv_key), kv_key)

    def admit(
        self, rid: str, ids: Sequence[int], *, spare_pages: int, hit_limit: int | None = None, kv_key: KvKey = PLAIN
    ) -> Lease | None:
        """Lease a row and the cached prefix of ``ids``, if all of ``ids`` fit and ``spare_pages`` remain.

        Returns None and takes nothing if it does not fit. The prefix has the same ``kv_key``. Only ``ids[:hit_limit]``
        may come from the cache, by default all tokens but the last: the next token needs a forward pass, so a fully
        cached prompt still computes one token. The next microbatch loads the pages of the prefix that are on the host
        into pages of the lease.
        """
        if not self.rows.free:
            return None
        most = _most_hit(ids, hit_limit)
        prefix = ids[:most]
        if self.sliding_window is not None:
            prefix = self._usable(prefix, self.sliding_window, kv_key)
        node, pages = self.tree.match(prefix, kv_key) if self._radix_cache else (self.tree.root, [])
        # Locked before the count, because the request's own prefix cannot be evicted for it.
        self.tree.lock(node)
        if self.pages_for(len(ids)) - len(pages) + spare_pages > self.available_pages:
            self.tree.unlock(node)
            return None
        lease = Lease(rid=rid, row=self.rows.allocate(1)[0], pages=pages, node=node, kv_key=kv_key)
        if self.host is not None and self.host.kept:
            self._load(lease, self._on_host(ids, len(pages), most, kv_key), self.host)
        window = self.sliding_window
        return lease if window is None or self._enter_window(lease, len(ids), spare_pages, window) else None

    def extend(self, lease: Lease, tokens: int) -> bool:
        """Extend a lease to pages for ``tokens`` tokens, with evictions if necessary.

        Returns False and takes nothing if they do not fit.
        """
        need = -(-tokens // self._page_size) - len(lease.pages)
        if need <= 0:
            return True
        window = self.sliding_window
        if window is not None and need > window.available_pages:
            return False
        short = need - self.pages.free
        if short > 0 and (short > self.tree.evictable_pages or self.tree.evict(short) < short):
            return False
        pages = self.pages.allocate(need)
        if window is not None:
            window.add(pages)
        lease.pages += pages
        return True

    def free_tokens_of(self, lease: Lease, *, spare_pages: int) -> int:
        """Return the tokens that fit into a lease with free pages only, and pages to spare."""
        window = self.sliding_window
        free = self.pages.free if window is None else min(self.pages.free, window.pages.free)
        return (len(lease.pages) + max(0, free - spare_pages)) * self._page_size

    def trim(self, lease: Lease, tokens: int) -> None:
        """Release the pages beyond this many tokens, which only the lease holds."""
        kept = self.pages_for(tokens)
        rest = lease.pages[kept:]
        if not rest:
            return
        if self.sliding_window is not None:
            self.sliding_window.give_up(rest)
        self.pages.release(rest)
        del lease.pages[kept:]
        lease.unsent = min(lease.unsent, kept)

    def slide(self, lease: Lease, position: int) -> None:
        """Release the window pages that no token from ``position`` on sees. All tokens before it are computed."""
        if self.sliding_window is not None:
            self.sliding_window.slide(lease, position)

    def publish(self, lease: Lease, ids: Sequence[int], *, counts: bool) -> None:
        """Hand the full pages of ``ids``, the confirmed tokens of a request, over to the tree.

        Requires that no microbatch with the request is in flight: the tree's page replaces a page of tokens that it
        already has, and no stage may read the old page.
        """
        if not self._radix_cache:
            return
        start, size, before = lease.cached_pages, self._page_size, lease.node
        end = max(start, len(ids) // size)
        tokens, own = ids[start * size : end * size], lease.pages[start:end]
        node, pages = self.tree.publish(before, tokens, own, counts=counts, kv_key=lease.kv_key)
        for index, page in enumerate(pages, start):
            if self.sliding_window is not None:
                self.sliding_window.publish(lease.pages[index], page)
            if lease.pages[index] != page:
                lease.pages[index] = page
                lease.unsent = min(lease.unsent, index)
        if node is not before:
            self.tree.lock(node)
            self.tree.unlock(before)
        lease.node, lease.cached_pages = node, end

    def release(self, lease: Lease) -> None:
        """Release everything that a lease owns, once. The only place that frees a request's memory."""
        if lease.released:
            raise IntegrityError(f"the memory of {lease.rid} is released twice")
        if self.sliding_window is not None:
            self.sliding_window.release(lease)
        self.tree.unlock(lease.node)
        self.pages.release(lease.held_pages)
        self.rows.release((lease.row,))
        lease.released = True

    def reset(self) -> None:
        """Drop the tree and all ownership. The caller has checked that the engine is idle."""
        self.tree.reset()
        self.pages.reset()
        self.rows.reset()
        if self.sliding_window is not None:
            self.sliding_window.reset()
        if self.host is not None:
            self.host.reset()
        if self.log is not None:
            self.log.cleared()

    # -- inside --

    def _on_host(self, ids: Sequence[int], start: int, most: int, kv_key: KvKey) -> Sequence[HostPage]:
        """Return the host pages that continue the first ``start`` pages of a prompt, which the tree serves."""
        host = self.host
        return host.match(ids[:most], start, kv_key) if host is not None and host.kept else ()

    def _load(self, lease: Lease, found: Sequence[HostPage], host: HostTier) -> None:
        """Copy host pages into new pages of a lease. The caller has checked that they fit."""
        before = len(lease.pages)
        # First, because pages evicted for the new ones may replace other host pages.
        host.protect(found)
        if not self.extend(lease, (before + len(found)) * self._page_size):
            raise IntegrityError(f"{lease.rid} was admitted, but has no room for {len(found)} pages from the host")
        host.load(found, lease.pages[before:])

    def _usable(self, ids: Sequence[int], window: SlidingWindowPool, kv_key: KvKey) -> Sequence[int]:
        """Return the cached part of a prompt whose last window is cached in the window pool too."""
        pages = self.tree.match_pages(ids, kv_key) if self._radix_cache else []
        return ids[: window.usable_pages(pages) * self._page_size]

    def _enter_window(self, lease: Lease, tokens: int, spare_pages: int, window: SlidingWindowPool) -> bool:
        """Protect the window of a new lease in its prefix, if its other window pages fit; else undo the lease."""
        window.attach(lease)
        need = window.need(self.pages_for(tokens), cached=len(lease.pages))
        if need + spare_pages <= window.available_pages:
            return True
        window.release(lease)
        self.tree.unlock(lease.node)
        self.rows.release((lease.row,))
        return False


def _most_hit(ids: Sequence[int], hit_limit: int | None) -> int:
    """Return the most tokens of a prompt that may come from the cache."""
    return len(ids) - 1 if hit_limit is None else hit_limit
