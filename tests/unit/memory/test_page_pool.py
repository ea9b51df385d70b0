"""The page pool: a page has one owner, and the counts are the pages'."""

from __future__ import annotations

import pytest

from engine.core.errors import IntegrityError
from engine.core.memory import PagePool, PageState
from engine.core.memory.integrity import check_pages


def test_lowest_free_pages_come_first() -> None:
    pool = PagePool(6, 16)
    assert pool.allocate(4) == [0, 1, 2, 3]
    pool.release([1])
    pool.release([3])
    assert pool.allocate(3) == [1, 3, 4]
    assert (pool.free, pool.held) == (1, 5)
    check_pages(pool)


def test_pages_go_from_free_to_held_to_cached_to_free() -> None:
    pool = PagePool(3, 16)
    pages = pool.allocate(2)
    pool.cache(pages)
    assert (pool.free, pool.held, pool.cached) == (1, 0, 2)
    assert pool.all_are(PageState.CACHED, pages)
    pool.evict(pages)
    assert (pool.free, pool.held, pool.cached) == (3, 0, 0)
    check_pages(pool)


@pytest.mark.parametrize("method", ["release", "cache", "evict"])
def test_page_that_is_free_cannot_be_given_back(method: str) -> None:
    """B08: freeing twice, or freeing what another request owns by now, is an error and not a second owner."""
    pool = PagePool(3, 16)
    with pytest.raises(IntegrityError, match="page 1 is FREE"):
        getattr(pool, method)([1])


def test_cached_page_cannot_be_released_by_a_request() -> None:
    """A page is freed by its owner alone (B08)."""
    pool = PagePool(3, 16)
    pages = pool.allocate(1)
    pool.cache(pages)
    with pytest.raises(IntegrityError, match="CACHED, not HELD"):
        pool.release(pages)


def test_more_than_there_is_is_an_error() -> None:
    with pytest.raises(IntegrityError, match="allocate\\(4\\) with 3 pages free"):
        PagePool(3, 16).allocate(4)


def test_wrong_count_is_found() -> None:
    pool = PagePool(3, 16)
    pool.allocate(1)
    pool.held = 2
    with pytest.raises(IntegrityError, match="booked as \\(2, 2, 0, 0\\)"):
        check_pages(pool)


@pytest.mark.parametrize(("total", "page_size"), [(0, 1), (1, 0)])
def test_empty_pools_are_refused(total: int, page_size: int) -> None:
    with pytest.raises(ValueError, match="total >= 1"):
        PagePool(total, page_size)


def test_a_page_that_was_kept_back_below_all_others_is_found_again() -> None:
    pool = PagePool(3, 16)
    pool.release(pool.allocate(3)[1:2])
    pool.reserve(1)
    pool.release([2])
    assert pool.allocate(1) == [2]
    pool.release_reserved(1)
    assert pool.allocate(1) == [1]


def test_what_an_operator_withholds_is_taken_from_the_other_end() -> None:
    """Requests get the same pages as without."""
    pool = PagePool(6)
    pool.reserve(2)
    assert pool.allocate(3) == [0, 1, 2]
    assert [pool.state(page) for page in (3, 4, 5)] == [PageState.FREE, PageState.RESERVED, PageState.RESERVED]
