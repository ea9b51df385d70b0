"""Pressure: pages, window pages, rows and tree nodes that an operator withholds from requests to produce scarcity.

Takes no memory from a request and makes no decision about one. A flush keeps the pressure, but drops pinned nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.memory import KVMemory, Node, PagePool
from engine.core.messages import Event, EvictCache, OperatorEvent, ReleasePressure, SetPressure


class Pressure:
    """The part of one memory that an operator withholds.

    An event is applied in its step, or ahead of it by ``intervene``; then the next step begins with it. The record of a
    step therefore has every change of the engine, and its replay reaches the same state.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._pages = memory.pages
        self._rows = memory.rows
        self._tree = memory.tree
        self._window = memory.sliding_window
        self._pins: list[Node] = []
        # Events applied since the last step.
        self.ahead: list[OperatorEvent] = []

    # -- events --

    def intervene(self, event: OperatorEvent) -> None:
        """Apply an event at once, between two steps; the next step must get it too, before all others."""
        self.apply(event)
        self.ahead.append(event)

    def not_yet_applied(self, events: Sequence[Event]) -> Sequence[Event]:
        """Return the events of a step without the first ones, if these were applied ahead of it."""
        ahead, self.ahead = self.ahead, []
        given = list(events[: len(ahead)])
        assert given == ahead, f"the step after {ahead} must begin with it, but begins with {given}"
        return events[len(ahead) :]

    def apply(self, event: OperatorEvent) -> None:
        """Bring the memory as near to the event's numbers as live requests allow."""
        if isinstance(event, EvictCache):
            self._tree.evict(self._tree.evictable_pages if event.pages is None else event.pages)
        elif isinstance(event, ReleasePressure):
            self._release()
        else:
            self._set(event)

    # -- reading --

    @property
    def pins(self) -> list[Node]:
        """Nodes of the current tree that are locked for no request."""
        if not self._pins:
            return []
        return [node for node in self._pins if node.generation == self._tree.generation]

    @property
    def is_on(self) -> bool:
        return bool(self._pages.reserved or self._rows.reserved or self.pins or self._kept_window_pages)

    @property
    def most_free_pages(self) -> int:
        """Free, withheld and unlocked cached pages."""
        return self._pages.free + self._pages.reserved + self._tree.evictable_pages

    @property
    def most_free_window_pages(self) -> int:
        """Free, withheld and unused cached window pages; 0 for a model without window layers."""
        return 0 if self._window is None else self._window.available_pages + self._kept_window_pages

    @property
    def most_free_rows(self) -> int:
        return self._rows.free + self._rows.reserved

    @property
    def most_unlocked_nodes(self) -> int:
        """Nodes that no live request protects, pinned or not."""
        pins: dict[Node, int] = {}
        for pin in self.pins:
            for node in self._tree.path(pin):
                pins[node] = pins.get(node, 0) + 1
        return sum(1 for node in self._tree.nodes() if node.lock_ref == pins.get(node, 0))

    # -- inside --

    def _set(self, event: SetPressure) -> None:
        """Set the pressure. Evicts cached pages only if free and reserved pages do not suffice."""
        if event.leave_pages is not None:
            _leave(self._pages, event.leave_pages, self._tree.evict)
        if event.leave_window_pages is not None and self._window is not None:
            _leave(self._window.pages, event.leave_window_pages, self._window.evict)
        if event.leave_rows is not None:
            _leave(self._rows, event.leave_rows)
        if event.leave_unlocked is not None:
            self._leave_unlocked(event.leave_unlocked)

    @property
    def _kept_window_pages(self) -> int:
        return 0 if self._window is None else self._window.pages.reserved

    def _leave_unlocked(self, count: int) -> None:
        self._unpin()
        # Parents come before their children: the ancestors of a pinned node are pinned or locked already.
        unlocked = [node for node in self._tree.nodes() if node.lock_ref == 0]
        for node in unlocked[: max(0, len(unlocked) - count)]:
            self._tree.lock(node)
            self._pins.append(node)

    def _unpin(self) -> None:
        for node in self.pins:
            self._tree.unlock(node)
        self._pins.clear()

    def _release(self) -> None:
        self._unpin()
        for pool in (self._pages, self._rows, *(() if self._window is None else (self._window.pages,))):
            pool.release_reserved(pool.reserved)


def _leave(pool: PagePool, count: int, evict: Callable[[int], object] | None = None) -> None:
    """Withhold all but ``count`` free pages, or release pages until ``count`` are free."""
    pool.release_reserved(max(0, count - pool.free))
    if evict is not None:
        evict(count - pool.free)
    pool.reserve(max(0, pool.free - count))
