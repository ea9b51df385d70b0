"""The window pool: window pages come with pages, go when they are out of the window, and are given back once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from lease_machine import LeaseMachine

from engine.core.errors import IntegrityError
from engine.core.memory import KVMemory, Lease, SlidingWindowPool
from engine.core.memory.integrity import check_memory

SIZE = 2


def memory_of(
    pages: int = 16, window_pages: int = 8, window: int = 4, *, rows: int = 4, row_pages: int = 6
) -> tuple[KVMemory, SlidingWindowPool]:
    window_pool = SlidingWindowPool(
        total_pages=pages, window_pages=window_pages, page_size=SIZE, window_tokens=window, row_pages=row_pages
    )
    return KVMemory(
        total_pages=pages, page_size=SIZE, rows=rows, radix_cache=True, sliding_window=window_pool
    ), window_pool


def admitted(memory: KVMemory, rid: str, ids: list[int], *, computed: int | None = None) -> Lease:
    lease = memory.admit(rid, ids, spare_pages=0)
    assert lease is not None
    assert memory.extend(lease, len(ids) if computed is None else computed)
    return lease


def finished(memory: KVMemory, ids: list[int]) -> None:
    lease = admitted(memory, "seed", ids)
    memory.publish(lease, ids, counts=True)
    memory.release(lease)


@pytest.mark.parametrize(("position", "first"), [(0, 0), (3, 0), (4, 0), (5, 1), (6, 1), (7, 2), (9, 3)])
def test_first_page_is_that_of_the_first_position_in_the_window(position: int, first: int) -> None:
    """B18: a query at p sees p - 3 .. p with a window of 4."""
    assert memory_of()[1].first_page(position) == first


def test_window_pages_are_given_back_when_they_leave_the_window_and_not_again_at_release() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, pool = memory_of()
    lease = admitted(memory, "r", list(range(10)))
    assert pool.pages.held == 5
    memory.slide(lease, 9)
    assert (pool.pages.held, memory.pages.held, lease.window_start) == (2, 5, 3)
    memory.slide(lease, 9)
    memory.slide(lease, 4)
    assert pool.pages.held == 2, "what is given back stays so, whatever is asked later"
    memory.release(lease)
    assert (pool.pages.free, memory.pages.free) == (8, 16)
    check_memory(memory, [])


@pytest.mark.parametrize("cached", range(7))
def test_need_is_what_a_request_takes_beside_what_it_sees_of_its_prefix(cached: int) -> None:
    """B18: with what it sees of a cached prefix never more than a row may hold, and never less than nothing."""
    _, pool = memory_of(row_pages=4)
    seen = cached - pool.first_page(cached * SIZE)
    needs = [pool.need(pages, cached=cached) for pages in range(cached, 12)]
    assert needs[0] == 0
    assert needs == sorted(needs)
    assert needs[1] == min(1, 4 - seen)
    assert needs[-1] + seen == 4


def test_request_longer_than_the_window_pool_slides_through_it() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, pool = memory_of(window_pages=4, row_pages=4)
    lease = admitted(memory, "r", list(range(30)), computed=4)
    for end in range(6, 32, 2):
        memory.slide(lease, end - 2)
        assert memory.extend(lease, end)
        assert pool.pages.held <= 4
    assert len(lease.pages) == 15


def test_extension_fails_and_takes_nothing_when_only_window_pages_are_short() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, pool = memory_of(window_pages=4, row_pages=4)
    lease = admitted(memory, "r", list(range(30)), computed=8)
    assert not memory.extend(lease, 9)
    assert (memory.pages.held, pool.pages.held) == (4, 4)


def test_admission_counts_window_pages_and_takes_nothing_when_they_are_short() -> None:
    """B18: with room in the page pool for both."""
    memory, pool = memory_of(window_pages=6)
    first = admitted(memory, "a", list(range(8)))
    assert memory.admit("b", list(range(50, 56)), spare_pages=0) is None
    assert (memory.rows.free, pool.pages.held, memory.tree.locked_pages) == (3, 4, 0)
    assert not memory.has_room(6, spare_pages=0)
    assert memory.has_room(6, spare_pages=0, without=[first])
    memory.slide(first, 8)
    assert memory.admit("b", list(range(50, 56)), spare_pages=0) is not None


def test_long_request_needs_no_more_window_pages_than_it_uses_at_once() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, _ = memory_of(window_pages=6, row_pages=6)
    assert memory.has_room(30, spare_pages=0)
    assert memory.admit("r", list(range(30)), spare_pages=0) is not None


def test_cached_prefix_is_used_as_far_as_its_window_is_there() -> None:
    """B18, B04: a prefix whose window pages were evicted is not used beyond what is valid."""
    memory, pool = memory_of(window_pages=6)
    ids = list(range(100, 108))
    finished(memory, ids)
    assert memory.cached_tokens([*ids, 1]) == 8
    # Two of the four window pages are evicted, the last first: then only the first two pages have window pages.
    other = admitted(memory, "other", list(range(8)))
    assert pool.pages.cached == 2
    assert memory.cached_tokens([*ids, 1]) == 4
    memory.release(other)
    lease = admitted(memory, "hit", [*ids, 1])
    assert (lease.cached_pages, lease.window_start) == (2, 0)
    check_memory(memory, [lease])


def test_window_is_protected_in_the_tree_and_what_is_before_it_is_not() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, pool = memory_of(window_pages=6)
    ids = list(range(100, 110))
    finished(memory, ids)
    lease = admitted(memory, "hit", [*ids, 1], computed=10)
    assert (lease.cached_pages, lease.window_start) == (5, 3)
    assert pool.available_pages == 4, "two of six are protected"
    assert memory.tree.locked_pages == 5
    other = admitted(memory, "other", list(range(8)))
    check_memory(memory, [lease, other])
    assert not memory.extend(lease, 11), "nothing else can be evicted"


def test_lost_window_pages_are_replaced_when_the_same_tokens_are_published_again() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, pool = memory_of(window_pages=6)
    ids = list(range(100, 108))
    finished(memory, ids)
    memory.release(admitted(memory, "other", list(range(12))))
    assert (pool.pages.cached, memory.cached_tokens([*ids, 1])) == (0, 0)
    finished(memory, ids)
    assert (memory.cached_tokens([*ids, 1]), memory.pages.cached, pool.pages.cached) == (8, 4, 4)


def test_published_window_page_that_the_tree_has_already_is_swapped_and_told_to_the_stages() -> None:
    """A window layer needs and keeps the last tokens alone (B18).

    KV is published once the step that wrote it is confirmed (B13).
    """
    memory, pool = memory_of()
    leases = [admitted(memory, rid, [1, 2, 3, 4]) for rid in "ab"]
    for lease in leases:
        lease.unsent = 2
        memory.publish(lease, [1, 2, 3, 4], counts=True)
    assert pool.window_pages_of(leases[1], 0) == pool.window_pages_of(leases[0], 0) == (0, 1)
    assert (leases[1].unsent, pool.pages.free) == (0, 6)
    check_memory(memory, leases)


def test_window_pages_go_with_the_pages_of_an_evicted_node() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, pool = memory_of()
    finished(memory, [1, 2, 3, 4])
    memory.tree.evict(1)
    assert (memory.pages.cached, pool.pages.cached) == (1, 1)
    memory.reset()
    assert (memory.pages.free, pool.pages.free) == (16, 8)


def test_plan_names_no_window_page_that_was_given_back() -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    memory, pool = memory_of()
    lease = admitted(memory, "r", list(range(8)))
    memory.slide(lease, 7)
    assert pool.window_pages_of(lease, 0) == (-1, -1, 2, 3)
    assert pool.window_pages_of(lease, 3) == (3,)


def test_window_page_that_is_given_back_unbooked_is_found() -> None:
    """B18, B11: given back twice, or forgotten."""
    for break_it in ("twice", "forgotten"):
        memory, pool = memory_of()
        lease = admitted(memory, "r", list(range(8)))
        check_memory(memory, [lease])
        if break_it == "twice":
            pool.pages.release([pool.window_pages_of(lease, 0)[0]])
        else:
            lease.window_start = 1
        with pytest.raises(IntegrityError):
            check_memory(memory, [lease])


class WindowMachine(LeaseMachine):
    """Windows slide and the tree is evicted in between."""

    def __init__(self) -> None:
        memory, self.pool = memory_of(pages=10, window_pages=6, window=3)
        super().__init__(memory)

    @rule(lease=LeaseMachine.leases, share=st.floats(0, 1))
    def slide(self, lease: Lease | None, share: float) -> None:
        if lease is not None and not lease.released:
            self.memory.slide(lease, int(len(lease.pages) * SIZE * share))

    @rule(count=st.integers(1, 4))
    def evict(self, count: int) -> None:
        self.memory.tree.evict(count)

    @invariant()
    def whole_pool_is_available_without_all_leases(self) -> None:
        assert self.pool.available_pages_without(self.live) == self.pool.pages.total


WindowMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None, database=None)
TestWindowMachine = WindowMachine.TestCase
