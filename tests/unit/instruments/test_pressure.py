"""Pressure on pages, rows and locks: exact, accounted for by the audit, and given back."""

from __future__ import annotations

import pytest

from engine.core.errors import IntegrityError
from engine.core.instruments import Pressure
from engine.core.memory import KVMemory, PagePool, PageState, SlidingWindowPool
from engine.core.memory.integrity import check_memory
from engine.core.messages import EvictCache, ReleasePressure, SetPressure


def memory_of(pages: int = 12, rows: int = 4) -> KVMemory:
    return KVMemory(total_pages=pages, page_size=2, rows=rows, radix_cache=True)


def cache(memory: KVMemory, *ids: int) -> None:
    lease = memory.admit("seed", ids, spare_pages=0)
    assert lease is not None
    assert memory.extend(lease, len(ids))
    memory.publish(lease, ids, counts=True)
    memory.release(lease)


def unlocked_nodes(memory: KVMemory) -> int:
    return sum(1 for node in memory.tree.nodes() if node.lock_ref == 0)


@pytest.mark.parametrize("leave", [0, 2, 5, 6])
def test_window_pages_are_left_exactly(leave: int) -> None:
    window = SlidingWindowPool(total_pages=12, window_pages=6, page_size=2, window_tokens=8, row_pages=6)
    memory = KVMemory(total_pages=12, page_size=2, rows=4, radix_cache=True, sliding_window=window)
    pressure = Pressure(memory)
    cache(memory, 1, 2, 3, 4, 5, 6)
    assert (window.pages.cached, pressure.most_free_window_pages) == (3, 6)
    pressure.apply(SetPressure(leave_window_pages=leave))
    assert (window.pages.free, window.pages.cached) == (leave, min(3, 6 - leave))
    assert (pressure.is_on, pressure.most_free_window_pages) == (leave < 3, 6)
    assert (memory.pages.free, memory.pages.cached) == (9, 3), "only window pages are kept or evicted"
    check_memory(memory, [], pressure.pins)
    pressure.apply(ReleasePressure())
    assert (window.pages.reserved, pressure.is_on) == (0, False)


def test_a_model_without_window_layers_has_no_window_page_to_leave() -> None:
    pressure = Pressure(memory_of())
    pressure.apply(SetPressure(leave_window_pages=0))
    assert (pressure.most_free_window_pages, pressure.is_on) == (0, False)


@pytest.mark.parametrize("leave", [0, 3, 9, 12])
def test_pages_are_left_exactly(leave: int) -> None:
    """D09: cache is evicted only when the free pages are not enough."""
    memory = memory_of()
    pressure = Pressure(memory)
    cache(memory, 1, 2, 3, 4, 5, 6)
    pressure.apply(SetPressure(leave_pages=leave))
    assert memory.pages.free == leave
    assert memory.pages.cached == min(3, 12 - leave)
    check_memory(memory, [], pressure.pins)


def test_pages_and_rows_come_back_as_they_were() -> None:
    """Scripts hold and release what a scheduler meets (D09)."""
    memory = memory_of()
    pressure = Pressure(memory)
    cache(memory, 1, 2, 3, 4)
    pressure.apply(SetPressure(leave_pages=1, leave_rows=1))
    pressure.apply(SetPressure(leave_pages=4, leave_rows=0))
    assert (memory.pages.free, memory.rows.free) == (4, 0)
    pressure.apply(ReleasePressure())
    assert (memory.pages.free, memory.pages.cached, memory.rows.free) == (10, 2, 4)
    assert memory.pages.allocate(3) == [2, 3, 4]


def test_requests_get_the_pages_that_they_always_got() -> None:
    memory = memory_of()
    pressure = Pressure(memory)
    pressure.apply(SetPressure(leave_pages=3, leave_rows=2))
    assert (memory.pages.allocate(3), memory.rows.allocate(1)[0]) == ([0, 1, 2], 0)
    assert memory.pages.state(11) is PageState.RESERVED


def test_unlocked_nodes_are_left_exactly_and_pinned_ones_stay() -> None:
    """D09: what is pinned is not evicted, and its locks are accounted for."""
    memory = memory_of()
    pressure = Pressure(memory)
    for first in (1, 11, 21):
        cache(memory, first, 2, 3, 4)
    pressure.apply(SetPressure(leave_unlocked=1))
    assert (unlocked_nodes(memory), pressure.most_unlocked_nodes) == (1, 3)
    check_memory(memory, [], pressure.pins)
    pressure.apply(EvictCache())
    assert memory.tree.node_count == 2
    pressure.apply(ReleasePressure())
    assert unlocked_nodes(memory) == 2
    check_memory(memory, [], pressure.pins)


def test_more_nodes_are_left_unlocked_than_there_are() -> None:
    memory = memory_of()
    pressure = Pressure(memory)
    cache(memory, 1, 2, 3, 4)
    cache(memory, 11, 2, 3, 4)
    pressure.apply(SetPressure(leave_unlocked=5))
    assert (unlocked_nodes(memory), pressure.pins) == (2, [])


def test_pinned_node_may_be_split() -> None:
    memory = memory_of()
    pressure = Pressure(memory)
    cache(memory, 1, 2, 3, 4, 5, 6)
    pressure.apply(SetPressure(leave_unlocked=0))
    cache(memory, 1, 2, 9, 9)
    check_memory(memory, [], pressure.pins)
    pressure.apply(ReleasePressure())
    assert unlocked_nodes(memory) == memory.tree.node_count == 3


def test_flush_keeps_what_is_reserved_and_forgets_pins() -> None:
    memory = memory_of()
    pressure = Pressure(memory)
    cache(memory, 1, 2, 3, 4)
    pressure.apply(SetPressure(leave_pages=5, leave_rows=1, leave_unlocked=0))
    memory.reset()
    assert (memory.pages.free, memory.rows.free, pressure.pins) == (7, 1, [])
    check_memory(memory, [], pressure.pins)


def test_part_of_the_cache_is_evicted() -> None:
    memory = memory_of()
    pressure = Pressure(memory)
    cache(memory, 1, 2, 3, 4, 5, 6)
    pressure.apply(EvictCache(pages=2))
    assert (memory.pages.cached, memory.pages.free) == (1, 11)


@pytest.mark.parametrize("pool", ["pages", "rows"])
def test_lost_reservation_is_found(pool: str) -> None:
    memory = memory_of()
    pressure = Pressure(memory)
    pressure.apply(SetPressure(leave_pages=5, leave_rows=1))
    getattr(memory, pool).reserved -= 1
    with pytest.raises(IntegrityError):
        check_memory(memory, [], pressure.pins)


@pytest.mark.parametrize("pool", [PagePool(3, 16), PagePool(3, unit="row")])
def test_more_than_is_free_cannot_be_reserved(pool: PagePool) -> None:
    with pytest.raises(IntegrityError, match=f"reserve\\(4\\) with 3 {pool.unit}s free"):
        pool.reserve(4)
