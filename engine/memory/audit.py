"""The audit of the memory step by step: its own tallies of leases, locks and nodes against what is booked.

It looks only at what changed since it last looked, so its cost does not grow with the tree.
``KVMemory.check_integrity`` is the full audit that it starts from.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.errors import IntegrityError
from engine.memory.changes import Changes
from engine.memory.kv import KVMemory
from engine.memory.lease import Lease
from engine.memory.node import Node
from engine.memory.sliding_window import SlidingWindowPool

__all__ = ["MemoryAudit"]


class MemoryAudit:
    """Tallies over one memory whose books balance now; ``leases`` are all that are alive."""

    def __init__(self, memory: KVMemory, leases: Iterable[Lease]) -> None:
        self._memory = memory
        self._generation = memory.tree.generation
        self._pressure_changes = memory.pressure.changes
        # Each live lease's node and number of held pages, as of the last look.
        self._leases: dict[Lease, tuple[Node, int]] = {}
        self._locks: dict[Node, int] = {}
        # Each node's pages, and how many of them were locked.
        self._nodes: dict[Node, tuple[int, int]] = {}
        self._held = self._cached = self._locked = 0
        # Each live lease's window pages of the tree and number of its own, and how many leases use each of the tree's.
        self._windows: dict[Lease, tuple[list[int], int]] = {}
        self._window_uses: dict[int, int] = {}
        self._window_held = 0
        memory.changes.clear()
        memory.changes.on = True
        for lease in leases:
            self._follow_lease(lease)
        for pin in memory.pressure.pins:
            self._count_locks(pin, 1)
        for node in memory.tree.nodes():
            self._follow_node(node)

    @property
    def live_leases(self) -> int:
        """Leases that were admitted and not released."""
        return len(self._leases)

    @property
    def is_outdated(self) -> bool:
        """True when a new audit must start from the full one: after a reset, new pressure, or too many changes."""
        memory = self._memory
        if memory.tree.generation != self._generation or memory.pressure.changes != self._pressure_changes:
            return True
        return memory.changes.overflowed

    def check(self) -> None:
        """Follow what changed and compare the sums. Raises IntegrityError that names what does not balance."""
        changes = self._memory.changes
        if changes.leases or changes.nodes:
            self._follow(changes)
        if self._memory.windows is not None:
            self._memory.windows.check_sums(held=self._window_held, used=len(self._window_uses))
        if not self._sums_balance():
            raise IntegrityError(
                f"{self._memory.pages} and {self._memory.rows} with {self._memory.tree.node_count} nodes, "
                f"{self._memory.tree.locked_pages} pages of them locked, are booked, but "
                f"{len(self._leases)} leases hold {self._held} pages and {len(self._nodes)} nodes cache "
                f"{self._cached}, {self._locked} of them locked"
            )

    def _follow(self, changes: Changes) -> None:
        for upper, lower in changes.splits:
            self._locks[upper] = self._locks.get(lower, 0)
        # Leases before nodes, because they say how many locks a node should have.
        for lease in dict.fromkeys(changes.leases):
            self._follow_lease(lease)
        if self._memory.windows is not None:
            self._memory.windows.check_users(self._window_uses)
        for node in dict.fromkeys(changes.nodes):
            self._follow_node(node)
        changes.clear()

    def _follow_lease(self, lease: Lease) -> None:
        before = self._leases.pop(lease, None)
        if before is not None:
            self._count_locks(before[0], -1)
            self._held -= before[1]
        if self._memory.windows is not None:
            self._follow_window(lease, self._memory.windows)
        if lease.released:
            return
        self._memory.check_lease(lease)
        held = len(lease.pages) - lease.cached_pages
        self._leases[lease] = (lease.node, held)
        self._count_locks(lease.node, 1)
        self._held += held

    def _follow_window(self, lease: Lease, windows: SlidingWindowPool) -> None:
        used, held = self._windows.pop(lease, ([], 0))
        uses = self._window_uses
        for twin in used:
            uses[twin] -= 1
            if not uses[twin]:
                del uses[twin]
        self._window_held -= held
        if lease.released:
            return
        used, held = self._windows[lease] = windows.used_by(lease)
        for twin in used:
            uses[twin] = uses.get(twin, 0) + 1
        self._window_held += held

    def _count_locks(self, node: Node, change: int) -> None:
        locks = self._locks
        for step in self._memory.tree.path(node):
            locks[step] = locks.get(step, 0) + change

    def _follow_node(self, node: Node) -> None:
        pages, locked = self._nodes.pop(node, (0, 0))
        self._cached -= pages
        self._locked -= locked
        locks = self._locks.get(node, 0)
        if node.lock_ref != locks:
            raise IntegrityError(f"node {node.id} has lock_ref {node.lock_ref}, but {locks} leases protect it")
        if not node.pages:
            self._locks.pop(node, None)
            return
        self._memory.tree.check_node(node)
        pages = len(node.pages)
        locked = pages if locks else 0
        self._nodes[node] = (pages, locked)
        self._cached += pages
        self._locked += locked

    def _sums_balance(self) -> bool:
        # One chain of comparisons: this is run after every step, changed or not.
        memory, pages, rows = self._memory, self._memory.pages, self._memory.rows
        return (
            self._held == pages.held
            and self._cached == pages.cached
            and pages.free + pages.held + pages.cached + pages.reserved == pages.total
            and self._locked == memory.tree.locked_pages
            and len(self._nodes) == memory.tree.node_count
            and len(self._leases) == rows.total - rows.free - rows.reserved
        )
