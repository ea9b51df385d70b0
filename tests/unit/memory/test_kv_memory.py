"""The memory of requests: a lease takes what fits or nothing, and gives everything back once."""

from __future__ import annotations

import pytest
from hypothesis import settings
from lease_machine import LeaseMachine

from engine.core.errors import IntegrityError
from engine.core.memory import KVMemory


def memory_of(pages: int = 8, page_size: int = 2, rows: int = 3, *, radix_cache: bool = True) -> KVMemory:
    return KVMemory(total_pages=pages, page_size=page_size, rows=rows, radix_cache=radix_cache)


def finished(memory: KVMemory, ids: list[int]) -> None:
    lease = memory.admit("seed", ids, spare_pages=0)
    assert lease is not None
    assert memory.extend(lease, len(ids))
    memory.publish(lease, ids, counts=True)
    memory.release(lease)


def test_last_token_never_comes_from_the_cache() -> None:
    """A prompt that is cached whole computes one token, and who waits holds no page (B04)."""
    memory = memory_of()
    finished(memory, [1, 2, 3, 4])
    lease = memory.admit("r", [1, 2, 3, 4], spare_pages=0)
    assert lease is not None
    assert lease.cached_pages == 1
    assert memory.cached_tokens([1, 2, 3, 4]) == 2


def test_lease_that_does_not_fit_takes_nothing() -> None:
    """B04: not a row, not a page, not a lock."""
    memory = memory_of(pages=4)
    finished(memory, [1, 2, 3, 4])
    assert memory.admit("r", [1, 2, 3, 4, 5, 6, 7], spare_pages=1) is None
    assert (memory.rows.free, memory.pages.held, memory.tree.locked_pages) == (3, 0, 0)
    assert memory.admit("r", [1, 2, 3, 4, 5, 6, 7], spare_pages=0) is not None


def test_extend_evicts_what_is_unprotected() -> None:
    memory = memory_of(pages=3)
    finished(memory, [1, 2, 3, 4])
    lease = memory.admit("r", [9, 8, 7, 6], spare_pages=0)
    assert lease is not None
    assert memory.extend(lease, 4)
    assert (memory.pages.cached, memory.pages.held) == (1, 2)
    assert not memory.extend(lease, 7)
    assert len(lease.pages) == 2, "a failed extension takes nothing"


def test_publish_swaps_pages_and_sends_them_again() -> None:
    memory = memory_of()
    leases = [memory.admit(rid, [1, 2, 3, 4], spare_pages=0) for rid in "ab"]
    for lease in leases:
        assert lease is not None
        memory.extend(lease, 4)
        lease.unsent = 2
        memory.publish(lease, [1, 2, 3, 4], counts=True)
    first, second = leases
    assert first is not None
    assert second is not None
    assert second.pages == first.pages == [0, 1]
    assert (first.unsent, second.unsent) == (2, 0)
    assert memory.pages.free == 6


def test_release_twice_is_an_error() -> None:
    """Memory is freed once, however a request ends (B11)."""
    memory = memory_of()
    lease = memory.admit("r", [1, 2, 3], spare_pages=0)
    assert lease is not None
    memory.release(lease)
    with pytest.raises(IntegrityError, match="memory of r is released twice"):
        memory.release(lease)


def test_available_without_counts_a_shared_prefix_once_and_only_if_no_other_protects_it() -> None:
    memory = memory_of(pages=8, rows=4)
    finished(memory, [1, 2, 3, 4])
    leases = [memory.admit(rid, [1, 2, 3, 4, 5], spare_pages=0) for rid in "abc"]
    one, two, three = [lease for lease in leases if lease is not None]
    for lease in (one, two, three):
        memory.extend(lease, 5)
    assert memory.available_pages == 3
    assert memory.available_pages_without([one, two]) == 5
    assert memory.available_pages_without([one, two, three]) == 8


def test_there_is_room_for_exactly_what_is_left() -> None:
    """B04: of four pages a request holds one, and what it gives back counts."""
    memory = memory_of(pages=4)
    lease = memory.admit("r", [1], spare_pages=0)
    assert lease is not None
    assert memory.extend(lease, 1)
    assert memory.has_room(6, spare_pages=0)
    assert memory.has_room(4, spare_pages=1)
    assert not memory.has_room(7, spare_pages=0)
    assert not memory.has_room(6, spare_pages=1)
    assert memory.has_room(8, spare_pages=0, without=[lease])
    assert not memory.has_room(9, spare_pages=0, without=[lease])


def test_without_radix_cache_nothing_is_shared() -> None:
    memory = memory_of(radix_cache=False)
    finished(memory, [1, 2, 3, 4])
    assert (memory.pages.cached, memory.cached_tokens([1, 2, 3, 4])) == (0, 0)
    assert memory.pages.free == 8


class MemoryMachine(LeaseMachine):
    def __init__(self) -> None:
        super().__init__(memory_of(pages=10, page_size=2, rows=4))


MemoryMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None, database=None)
TestMemoryMachine = MemoryMachine.TestCase
