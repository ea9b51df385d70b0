"""Inputs of OpenVINO's paged attention: a batch that goes on equals a new one."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

pytest.importorskip("openvino")

from engine.core.config import EngineConfig
from engine.core.errors import StepFailedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.plan import Segment
from engine.model.openvino.batch import BlockBatch, BlockFormat, BlockPool

ROWS = 4
TABLE_TOKENS = 512


def pool_of(page_size: int) -> BlockPool:
    config = EngineConfig(
        page_size=page_size,
        max_total_tokens=ROWS * TABLE_TOKENS,
        max_running_requests=ROWS,
        context_length=TABLE_TOKENS,
    )
    block = BlockFormat("f32", (2, 32, 16))
    return BlockPool(Limits.of(config, EMBEDDED_FACTS), [(block, block)])


class Decoding:
    """Rows that decode over scattered pages, each of which comes with the segment that needs it."""

    def __init__(self, pool: BlockPool, starts: list[int]) -> None:
        self.pool = pool
        self.starts = starts
        self._pages = random.Random(5).sample(range(pool.total_slots // pool.page_size), ROWS * TABLE_TOKENS // 64)
        self._given = [0] * len(starts)

    def step(self) -> list[Segment]:
        segments = []
        for row, start in enumerate(self.starts):
            have, needed = self._given[row], start // self.pool.page_size + 1
            pages = tuple(self._pages.pop() for _ in range(needed - have))
            self._given[row] = needed
            segments.append(Segment(f"r{row}", row, start, (start * 7 % 200,), have, pages, True))
            self.pool.adopt(segments[-1])
        self.starts = [start + 1 for start in self.starts]
        return segments


def same(one: BlockBatch, other: BlockBatch) -> None:
    assert one.arrays.keys() == other.arrays.keys()
    for name, array in one.arrays.items():
        assert array.dtype == other.arrays[name].dtype
        np.testing.assert_array_equal(array, other.arrays[name], err_msg=name)
    np.testing.assert_array_equal(one.slots_array, other.slots_array)
    np.testing.assert_array_equal(one.positions_array, other.positions_array)
    assert one.id_range == other.id_range
    assert one.segments == other.segments


@pytest.mark.parametrize(("page_size", "starts"), [(32, [0, 5, 31, 32]), (64, [30, 31, 63, 7]), (32, [17])])
def test_a_batch_that_goes_on_is_what_a_new_one_would_be(page_size: int, starts: list[int]) -> None:
    """B01: over new pages, over new blocks of a page, and within a block."""
    rows = Decoding(pool_of(page_size), starts)
    batch = BlockBatch(rows.step(), rows.pool)
    for _ in range(70):
        segments = rows.step()
        assert batch.goes_on_with(segments)
        same(batch, BlockBatch(segments, rows.pool))


def test_pages_that_change_under_a_batch_are_looked_up() -> None:
    """B06: a row may have got other pages since, without a place beyond its last one."""
    rows = Decoding(pool_of(32), [5, 6])
    batch = BlockBatch(rows.step(), rows.pool)
    rows.pool.adopt(Segment("other", 1, 0, (1,), 0, (40,), False))
    segments = rows.step()
    assert batch.goes_on_with(segments)
    same(batch, BlockBatch(segments, rows.pool))


@pytest.mark.parametrize("change", [{"row": 2}, {"start": 9}, {"token_ids": (1, 2)}, {"emits": False}])
def test_a_batch_goes_on_with_nothing_else(change: dict[str, object]) -> None:
    rows = Decoding(pool_of(32), [5, 6])
    batch = BlockBatch(rows.step(), rows.pool)
    first, second = rows.step()
    fields = {name: getattr(second, name) for name in second.__struct_fields__}
    assert not batch.goes_on_with([first])
    assert not batch.goes_on_with([second, first])
    assert not batch.goes_on_with([first, Segment(**(fields | change))])
    assert batch.goes_on_with([first, second])


def test_a_prompt_is_no_batch_that_goes_on() -> None:
    pool = pool_of(32)
    prompt = Segment("r", 0, 0, (1, 2, 3), 0, (4,), True)
    pool.adopt(prompt)
    assert not BlockBatch([prompt], pool).goes_on_with([Segment("r", 0, 1, (4,), 0, (), True)])


def test_a_place_that_no_table_has_fails_each_time() -> None:
    """A05: the step after a failed one is looked up again."""
    pool = pool_of(32)
    last = TABLE_TOKENS - 1
    pool.adopt(Segment("r", 0, 0, (1,), 0, tuple(range(TABLE_TOKENS // 32)), True))
    segments = (Segment("r", 0, start, (1,), 0, (), True) for start in itertools.count(last))
    batch = BlockBatch([next(segments)], pool)
    for _ in range(2):
        with pytest.raises(StepFailedError, match="places of pages of a segment must be in"):
            batch.goes_on_with([next(segments)])
