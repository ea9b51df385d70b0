"""The memory of requests: page pool, rows and prefix tree, and the one place where a request's memory is freed.

It decides nothing about order or time. A request takes a lease at admission, extends it chunk by chunk, publishes what
is confirmed, and releases the lease once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.errors import IntegrityError
from engine.memory.changes import Changes
from engine.memory.lease import Lease
from engine.memory.node import Node
from engine.memory.pages import PagePool, PageState
from engine.memory.pressure import Pressure
from engine.memory.radix import RadixTree
from engine.memory.rows import RowPool
from engine.memory.sliding_window import SlidingWindowPool

__all__ = ["KVMemory"]


class KVMemory:
    """``pages``, ``rows`` and ``tree`` of one engine, and ``windows`` if its model has window layers."""

    def __init__(
        self,
        *,
        total_pages: int,
        page_size: int,
        rows: int,
        radix_cache: bool,
        windows: SlidingWindowPool | None = None,
    ) -> None:
        self.pages = PagePool(total_pages, page_size)
        self.rows = RowPool(rows)
        self.windows = windows
        self.changes = Changes()
        self.tree = RadixTree(self.pages, self.changes, windows)
        self.pressure = Pressure(self.pages, self.rows, self.tree)
        self._page_size = page_size
        self._radix_cache = radix_cache

    @property
    def available_pages(self) -> int:
        """Pages that are free or could be, by evicting what nobody protects."""
        return self.pages.free + self.tree.evictable_pages

    def available_pages_without(self, leases: Sequence[Lease]) -> int:
        """Pages that would be available if these leases were released. A prefix that others protect as well stays."""
        locks: dict[Node, int] = {}
        for lease in leases:
            for node in self.tree.path(lease.node):
                locks[node] = locks.get(node, 0) + 1
        unlocked = sum(len(node.pages) for node, count in locks.items() if node.lock_ref == count)
        return self.available_pages + unlocked + sum(len(lease.pages) - lease.cached_pages for lease in leases)

    def has_room(self, tokens: int, *, spare_pages: int, without: Sequence[Lease] = ()) -> bool:
        """Whether so many tokens would fit, with pages to spare, if these leases were released."""
        pages = self.pages_for(tokens)
        if pages + spare_pages > self.available_pages_without(without):
            return False
        windows = self.windows
        return windows is None or windows.need(pages) + spare_pages <= windows.available_pages_without(without)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self._page_size)

    def cached_tokens(self, ids: Sequence[int]) -> int:
        """Tokens of a prompt that the tree could serve now. Changes nothing."""
        if not self._radix_cache:
            return 0
        return self.tree.match_length(ids[:-1]) if self.windows is None else len(self._usable(ids, self.windows))

    def admit(self, rid: str, ids: Sequence[int], *, spare_pages: int) -> Lease | None:
        """Lease a row and the cached prefix of ``ids``, if all of ``ids`` fit and ``spare_pages`` are left over.

        None, and nothing taken, when it does not fit. The last token never comes from the cache: without a forward pass
        there is no next token, so a fully cached prompt still computes one.
        """
        if not self.rows.free:
            return None
        prefix = ids[:-1] if self.windows is None else self._usable(ids, self.windows)
        node, pages = self.tree.match(prefix) if self._radix_cache else (self.tree.root, [])
        # Locked before the count, because what the request itself protects cannot be evicted for it.
        self.tree.lock(node)
        if self.pages_for(len(ids)) - len(pages) + spare_pages > self.available_pages:
            self.tree.unlock(node)
            return None
        lease = Lease(rid=rid, row=self.rows.allocate(), pages=pages, node=node)
        if self.windows is not None and not self._enter_window(lease, len(ids), spare_pages, self.windows):
            return None
        self._note(lease)
        return lease

    def extend(self, lease: Lease, tokens: int) -> bool:
        """Make sure that a lease has pages for ``tokens`` tokens, evicting if it must.

        False, and nothing taken, if it can't.
        """
        need = -(-tokens // self._page_size) - len(lease.pages)
        if need <= 0:
            return True
        windows = self.windows
        if windows is not None and need > windows.available_pages:
            return False
        short = need - self.pages.free
        if short > 0 and (short > self.tree.evictable_pages or self.tree.evict(short) < short):
            return False
        pages = self.pages.allocate(need)
        if windows is not None:
            windows.add(pages)
        lease.pages += pages
        self._note(lease)
        return True

    def slide(self, lease: Lease, position: int) -> None:
        """Give back the window pages that nothing from ``position`` on can see. All before it is computed and back."""
        if self.windows is not None and self.windows.slide(lease, position):
            self._note(lease)

    def publish(self, lease: Lease, ids: Sequence[int], *, counts: bool) -> None:
        """Hand the full pages of ``ids``, the confirmed tokens of a request, over to the tree.

        Only while no microbatch with the request is in flight: a page whose tokens the tree has already is swapped for
        the tree's own, and no stage may be reading the old one.
        """
        if not self._radix_cache:
            return
        start, size, before = lease.cached_pages, self._page_size, lease.node
        end = max(start, len(ids) // size)
        node, pages = self.tree.publish(before, ids[start * size : end * size], lease.pages[start:end], counts=counts)
        for index, page in enumerate(pages, start):
            if self.windows is not None:
                self.windows.publish(lease.pages[index], page)
            if lease.pages[index] != page:
                lease.pages[index] = page
                lease.unsent = min(lease.unsent, index)
        if node is not before:
            self.tree.lock(node)
            self.tree.unlock(before)
        lease.node, lease.cached_pages = node, end
        self._note(lease)

    def release(self, lease: Lease) -> None:
        """Give back everything that a lease owns, once. The only place that frees a request's memory."""
        if lease.released:
            raise IntegrityError(f"the memory of {lease.rid} is released twice")
        if self.windows is not None:
            self.windows.release(lease)
        self.tree.unlock(lease.node)
        self.pages.release(lease.held_pages)
        self.rows.release(lease.row)
        lease.released = True
        self._note(lease)

    def reset(self) -> None:
        """Drop the tree and forget every owner. Whoever calls has asked the one idle predicate."""
        self.tree.reset()
        self.pressure.forget_pins()
        self.pages.reset()
        self.rows.reset()
        if self.windows is not None:
            self.windows.reset()

    def check_integrity(self, leases: Iterable[Lease]) -> None:
        """Every page, row and lock is accounted for by one of ``leases``, which are all alive, or by the operator."""
        held: list[int] = []
        locks: dict[Node, int] = {}
        rows = 0
        leases = list(leases)
        if self.windows is not None:
            self._check_windows(self.windows, leases)
        for lease in leases:
            self.check_lease(lease)
            for node in self.tree.path(lease.node):
                locks[node] = locks.get(node, 0) + 1
            held += lease.held_pages
            rows += 1
        for pin in self.pressure.pins:
            for node in self.tree.path(pin):
                locks[node] = locks.get(node, 0) + 1
        self.pages.check_integrity()
        self.rows.check_integrity()
        self.tree.check_integrity()
        if len(held) != self.pages.held or len(set(held)) != len(held):
            raise IntegrityError(f"leases hold pages {sorted(held)}, but {self.pages.held} pages are booked as held")
        taken = self.rows.total - self.rows.free - self.rows.reserved
        if rows != taken:
            raise IntegrityError(f"{rows} leases own rows, but {taken} rows are taken")
        for node in self.tree.nodes():
            if node.lock_ref != locks.get(node, 0):
                raise IntegrityError(
                    f"node {node.id} has lock_ref {node.lock_ref}, but {locks.get(node, 0)} leases protect it"
                )

    def check_lease(self, lease: Lease) -> None:
        """One live lease by itself.

        Its cached pages are those of its node's path, the others are held, its row is taken.
        """
        above = lease.cached_pages
        self.tree.check_own(lease.node)
        for node in self.tree.path(lease.node):
            if lease.pages[above - len(node.pages) : above] != node.pages:
                raise IntegrityError(f"{lease} does not use the pages of its prefix: node {node.id} has {node.pages}")
            above -= len(node.pages)
        if above:
            raise IntegrityError(f"{lease} counts {above} cached pages more than its prefix has")
        if not self.pages.all_are(PageState.HELD, lease.held_pages):
            raise IntegrityError(f"{lease} holds pages {lease.held_pages}, of which some are not HELD")
        if lease.released or not self.rows.is_taken(lease.row):
            raise IntegrityError(f"{lease} owns row {lease.row}, which is free")
        if self.windows is not None:
            self.windows.check_lease(lease)

    # -- inside --

    def _usable(self, ids: Sequence[int], windows: SlidingWindowPool) -> Sequence[int]:
        """The part of a prompt that is cached and whose last window of tokens is cached in the window pool too."""
        pages = self.tree.match_pages(ids[:-1]) if self._radix_cache else []
        return ids[: windows.usable_pages(pages) * self._page_size]

    def _enter_window(self, lease: Lease, tokens: int, spare_pages: int, windows: SlidingWindowPool) -> bool:
        """Protect what a new lease sees of its prefix, if its other window pages would fit; else undo the lease."""
        windows.attach(lease)
        need = windows.need(self.pages_for(tokens), cached=len(lease.pages))
        if need + spare_pages <= windows.available_pages:
            return True
        windows.release(lease)
        self.tree.unlock(lease.node)
        self.rows.release(lease.row)
        return False

    def _check_windows(self, windows: SlidingWindowPool, leases: Sequence[Lease]) -> None:
        windows.check_integrity()
        uses: dict[int, int] = {}
        held = 0
        for lease in leases:
            used, own = windows.used_by(lease)
            held += own
            for twin in used:
                uses[twin] = uses.get(twin, 0) + 1
        windows.check_users(uses)
        windows.check_sums(held=held, used=len(uses))

    def _note(self, lease: Lease) -> None:
        if self.changes.on:
            self.changes.leases.append(lease)
