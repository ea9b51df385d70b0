"""Pressure: pages, window pages, rows and tree nodes that an operator keeps from requests, to meet scarcity at will.

It takes nothing from a request and never decides about one. What is kept stays kept over a flush, except for pins,
whose nodes a flush forgets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.memory import KVMemory, Node, PagePool
from engine.core.messages import Event, EvictCache, OperatorEvent, ReleasePressure, SetPressure


class Pressure:
    """The part of one memory that an operator keeps back.

    An event is applied in the step that is given it, or ahead of that step by ``intervene``; then that step begins
    with it. So the record of a step has everything that changed the engine, and replays to the same state.
    """

    def __init__(self, memory: KVMemory) -> None:
        self._pages = memory.pages
        self._rows = memory.rows
        self._tree = memory.tree
        self._window = memory.sliding_window
        self._pins: list[Node] = []
        # What was applied since the last step.
        self.ahead: list[OperatorEvent] = []

    # -- events --

    def intervene(self, event: OperatorEvent) -> None:
        """Apply an event between two steps, at once; the next step must be given it too, before all others."""
        self.apply(event)
        self.ahead.append(event)

    def not_yet_applied(self, events: Sequence[Event]) -> Sequence[Event]:
        """The events of a step without those that were applied ahead of it, which it must begin with."""
        ahead, self.ahead = self.ahead, []
        given = list(events[: len(ahead)])
        assert given == ahead, f"the step after {ahead} must begin with it, but begins with {given}"
        return events[len(ahead) :]

    def apply(self, event: OperatorEvent) -> None:
        """Bring the memory as near to the event's numbers as the requests' own memory allows."""
        if isinstance(event, EvictCache):
            self._tree.evict(self._tree.evictable_pages if event.pages is None else event.pages)
        elif isinstance(event, ReleasePressure):
            self._release()
        else:
            self._set(event)

    # -- looking --

    @property
    def pins(self) -> list[Node]:
        """Nodes of the present tree that are locked for no request."""
        if not self._pins:
            return []
        return [node for node in self._pins if node.generation == self._tree.generation]

    @property
    def is_on(self) -> bool:
        return bool(self._pages.reserved or self._rows.reserved or self.pins or self._kept_window_pages)

    @property
    def most_free_pages(self) -> int:
        """Pages that could be free now: those that are, those kept back, and the cache that no request protects."""
        return self._pages.free + self._pages.reserved + self._tree.evictable_pages

    @property
    def most_free_window_pages(self) -> int:
        """The same for window pages; 0 for a model without window layers."""
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
        """Set the pressure. Cached pages are evicted only where free and reserved pages are not enough."""
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
        # Parents come before their children, so a node that is pinned has its ancestors pinned or locked already.
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
    """Keep from requests all that is free but ``count``, or give back what is missing to it."""
    pool.release_reserved(max(0, count - pool.free))
    if evict is not None:
        evict(count - pool.free)
    pool.reserve(max(0, pool.free - count))
