"""The second tier: what leaves the page pool is kept, hit once it is there, and makes room for nothing while in use."""

from __future__ import annotations

import pytest

from engine.core.errors import IntegrityError
from engine.core.memory import HostTier, KVMemory, Lease, PageState
from engine.core.memory.integrity import check_host

SIZE = 2


def memory_of(*, pages: int = 8, host: int = 4) -> KVMemory:
    tier = HostTier(total_pages=host, page_size=SIZE)
    return KVMemory(total_pages=pages, page_size=SIZE, rows=3, radix_cache=True, host=tier)


def tier_of(memory: KVMemory) -> HostTier:
    assert memory.host is not None
    return memory.host


def finished(memory: KVMemory, ids: list[int], *, lora: int = 0) -> None:
    lease = admitted(memory, ids, lora=lora)
    memory.publish(lease, ids, counts=True)
    memory.release(lease)


def admitted(memory: KVMemory, ids: list[int], *, lora: int = 0) -> Lease:
    lease = memory.admit("r", ids, spare_pages=0, kv_key=(lora, 0))
    assert lease is not None
    assert memory.extend(lease, len(ids))
    return lease


def carried(memory: KVMemory) -> tuple[int, int]:
    """A microbatch carries out all copies and is back; how many there were."""
    out, into = tier_of(memory).launch()
    tier_of(memory).land(out, into, failed=False)
    check_host(tier_of(memory), (), ())
    return len(out), len(into)


def on_host(memory: KVMemory, ids: list[int], *, pages: int) -> None:
    finished(memory, ids)
    memory.tree.evict(pages)
    assert carried(memory) == (pages, 0)


def test_what_is_evicted_is_hit_when_its_copy_is_back() -> None:
    memory, ids = memory_of(), [1, 2, 3, 4, 5]
    finished(memory, ids)
    memory.tree.evict(2)
    assert memory.cached_tokens(ids) == 0, "a copy that is due is no hit"
    out, into = tier_of(memory).launch()
    assert memory.cached_tokens(ids) == 0, "a copy in flight is no hit"
    tier_of(memory).land(out, into, failed=False)
    assert memory.cached_tokens(ids) == 4
    assert memory.cached_tokens(ids[:4]) == 2, "the last token is never hit"
    assert memory.cached_tokens(ids, 3) == 2
    assert memory.cached_tokens(ids, kv_key=(1, 0)) == 0
    lease = admitted(memory, ids)
    assert (lease.cached_pages, len(lease.pages)) == (0, 3)
    out, into = tier_of(memory).launch()
    assert [page for _, page in into] == lease.pages[:2]


def test_the_host_goes_on_where_the_tree_ends() -> None:
    memory, ids = memory_of(), [1, 2, 3, 4, 5, 6, 7]
    finished(memory, ids)
    memory.tree.evict(2)
    carried(memory)
    lease = admitted(memory, ids)
    assert (lease.cached_pages, len(tier_of(memory).due_in)) == (1, 2)
    carried(memory)
    memory.publish(lease, ids, counts=True)
    assert memory.tree.match_length(ids) == 6


def test_a_copy_that_failed_leaves_nothing() -> None:
    memory, ids = memory_of(), [1, 2, 3, 4, 5]
    finished(memory, ids)
    memory.tree.evict(2)
    out, into = tier_of(memory).launch()
    tier_of(memory).land(out, into, failed=True)
    assert memory.cached_tokens(ids) == 0
    assert tier_of(memory).pages.free == tier_of(memory).pages.total


def test_what_is_on_the_host_is_not_written_again() -> None:
    memory, ids = memory_of(), [1, 2, 3, 4, 5]
    on_host(memory, ids, pages=2)
    lease = admitted(memory, ids)
    carried(memory)
    memory.publish(lease, ids, counts=True)
    memory.release(lease)
    memory.tree.evict(2)
    assert not tier_of(memory).has_due
    assert memory.cached_tokens(ids) == 4


def test_room_is_made_of_what_was_used_longest_ago_the_end_of_a_prefix_first() -> None:
    memory = memory_of(host=3)
    on_host(memory, [1, 2, 3, 4, 5], pages=2)
    on_host(memory, [7, 8, 9], pages=1)
    on_host(memory, [5, 6, 9], pages=1)
    assert memory.cached_tokens([1, 2, 3, 4, 5]) == 2
    admitted(memory, [1, 2, 9])
    carried(memory)
    on_host(memory, [3, 3, 9], pages=1)
    assert [memory.cached_tokens(ids) for ids in ([1, 2, 9], [7, 8, 9], [5, 6, 9], [3, 3, 9])] == [2, 0, 2, 2]


def test_what_a_copy_uses_makes_no_room() -> None:
    """Pages that are being read or written may not be dropped; without any other the evicted page is lost."""
    memory = memory_of(host=2)
    on_host(memory, [1, 2, 9], pages=1)
    admitted(memory, [1, 2, 9])
    finished(memory, [3, 4, 9])
    memory.tree.evict(1)
    read = tier_of(memory).launch()
    finished(memory, [5, 6, 9])
    memory.tree.evict(1)
    assert not tier_of(memory).has_due
    tier_of(memory).land(*read, failed=False)
    assert [memory.cached_tokens(ids) for ids in ([1, 2, 9], [3, 4, 9], [5, 6, 9])] == [2, 2, 0]


def test_a_page_that_is_about_to_be_loaded_makes_no_room() -> None:
    """The pool is full, so the loaded page needs an eviction, whose page finds no room on the host."""
    memory = memory_of(pages=3, host=1)
    on_host(memory, [1, 2, 9], pages=1)
    for ids in ([3, 4, 9], [5, 6, 9]):
        finished(memory, ids)
    memory.pages.reserve(memory.pages.free)
    lease = memory.admit("r", [1, 2, 9], spare_pages=0)
    assert lease is not None
    assert memory.cached_tokens([1, 2, 9]) == 2
    assert carried(memory) == (0, 1)


def test_a_copy_that_is_not_launched_gives_way() -> None:
    memory = memory_of(host=1)
    finished(memory, [1, 2, 3, 4, 5])
    memory.tree.evict(2)
    assert carried(memory) == (1, 0)
    assert memory.cached_tokens([1, 2, 3, 4, 5]) == 2, "of a prefix the beginning stays"


def test_a_reset_forgets_the_host() -> None:
    memory, ids = memory_of(), [1, 2, 3, 4, 5]
    on_host(memory, ids, pages=2)
    finished(memory, [7, 8, 9])
    memory.tree.evict(1)
    memory.reset()
    assert memory.cached_tokens(ids) == 0
    assert not tier_of(memory).has_due
    assert tier_of(memory).pages.free == tier_of(memory).pages.total


@pytest.mark.parametrize("broken", ["readers", "written", "state", "unknown"])
def test_the_audit_names_what_does_not_balance(broken: str) -> None:
    memory = memory_of()
    on_host(memory, [1, 2, 3], pages=1)
    tier = tier_of(memory)
    page = next(iter(tier.kept.values()))
    if broken == "readers":
        page.readers = 1
    elif broken == "written":
        page.is_ready = False
    elif broken == "state":
        tier.pages.evict((page.number,))
        tier.pages.hold((page.number,))
    else:
        tier.pages.allocate(1)
    with pytest.raises(IntegrityError):
        check_host(tier, (), ())


def test_a_page_that_is_not_in_use_is_no_copys() -> None:
    tier = HostTier(total_pages=2, page_size=SIZE)
    assert tier.pages.state(0) is PageState.FREE
    with pytest.raises(IntegrityError, match="host page 0 is copied, but is not in use"):
        tier.land((), ((0, 3),), failed=False)
