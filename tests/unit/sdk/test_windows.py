"""Layers with a sliding window have a block table of their own, of which only the window is read.

Goal: what a window left behind may be anything, what is in it must be the request's own. Method: plans written by hand
with two tables. Origin: vLLM's hybrid models. Mutant: in `SimulatedRunner._read`, begin windows at 0, or check none.
"""

from __future__ import annotations

import pytest
from planned_run import PlannedRun, share

from scripted.sdk import Limits, Violation, Window

# Blocks 0 to 5 are of the first pool, 6 to 8 of the second.
POOLS = Limits(block_size=4, blocks=9, pools=(6, 3), batch_tokens=16, batch_requests=3, context_tokens=32, depth=2)


def window(*blocks: int) -> tuple[Window, ...]:
    return (Window(block_ids=blocks, tokens=3),)


def after_six_positions() -> PlannedRun:
    run = PlannedRun()
    run.add("a", prompt=8, new=2)
    run.step(share("a", 0, 6, 1, 2, windows=window(3, 4)))
    run.take_result()
    return run


def test_blocks_before_the_window_may_be_anything() -> None:
    run = after_six_positions()
    run.step(share("a", 6, 2, 1, 2, windows=window(0, 4)))


def test_the_window_must_hold_what_the_request_computed() -> None:
    run = after_six_positions()
    with pytest.raises(Violation, match=r"slot 0 of block 5, its position 4"):
        run.step(share("a", 6, 2, 1, 2, windows=window(0, 5)))


def test_a_block_of_the_window_is_written_for_one_request() -> None:
    run = PlannedRun()
    run.add("a", prompt=4)
    run.add("b", prompt=4, seed=1)
    with pytest.raises(Violation, match=r"writes block 3 for a and for b|reads the wrong KV"):
        run.step(share("a", 0, 4, 1, windows=window(3)), share("b", 0, 4, 2, windows=window(3)))


def test_the_window_has_room_for_what_is_computed() -> None:
    run = PlannedRun()
    run.add("a", prompt=8)
    with pytest.raises(Violation, match=r"has room for 4 in its blocks \[3\]"):
        run.step(share("a", 0, 8, 1, 2, windows=window(3)))


def test_a_chunk_is_read_from_its_first_position() -> None:
    """Positions 4 to 7 are a chunk: 6 reads from 4 on, where a window of four would begin at 3."""
    run = PlannedRun()
    run.add("a", prompt=8, new=2)
    run.step(share("a", 0, 6, 1, 2, windows=chunk(3, 4)))
    run.take_result()
    run.step(share("a", 6, 2, 1, 2, windows=chunk(0, 4)))
    run = PlannedRun()
    run.add("a", prompt=8, new=2)
    run.step(share("a", 0, 3, 1, windows=chunk(3)))
    run.take_result()
    with pytest.raises(Violation, match=r"slot 0 of block 5, its position 0"):
        run.step(share("a", 3, 1, 1, windows=chunk(5)))


def chunk(*blocks: int) -> tuple[Window, ...]:
    return (Window(block_ids=blocks, tokens=4, is_chunk=True),)


def test_each_table_is_in_one_pool_but_for_what_the_window_has_left() -> None:
    run = PlannedRun(POOLS)
    run.add("a", prompt=8, new=2)
    run.step(share("a", 0, 6, 1, 2, windows=window(6, 7)))
    run.take_result()
    run.step(share("a", 6, 2, 1, 2, windows=window(0, 7)))


@pytest.mark.parametrize(
    ("own", "others", "text"),
    [
        ((1, 2), (6, 3), r"blocks \[6, 3\], not in one of the pools of 6 and 3 blocks"),
        ((1, 2), (8, 9), r"blocks \[8, 9\], not in one of"),
        ((6, 7), (1, 2), "a has table 0 in pool 1, but this table is in pool 0"),
    ],
)
def test_a_table_in_the_wrong_pool_is_named(own: tuple[int, ...], others: tuple[int, ...], text: str) -> None:
    run = PlannedRun(POOLS)
    run.add("a", prompt=8)
    with pytest.raises(Violation, match=text):
        run.step(share("a", 0, 8, *own, windows=window(*others)))


def test_a_table_has_one_pool_for_all_requests() -> None:
    run = PlannedRun(POOLS)
    run.add("a", prompt=4)
    run.add("b", prompt=4, seed=1)
    with pytest.raises(Violation, match="b has table 1 in pool 0, but this table is in pool 1"):
        run.step(share("a", 0, 4, 1, windows=window(6)), share("b", 0, 4, 2, windows=window(3)))


def test_requests_fit_together_if_they_fit_into_each_pool() -> None:
    """Two requests of two blocks each: six and three blocks have no room for both, six and four have."""
    for second, fits in ((3, False), (4, True)):
        sizes = {"block_size": 4, "batch_tokens": 16, "batch_requests": 3, "context_tokens": 32, "depth": 2}
        run = PlannedRun(Limits(blocks=6 + second, pools=(6, second), **sizes))
        run.add("a")
        run.add("b", seed=1)
        run.step(share("a", 0, 6, 1, 2, windows=window(6, 7)))
        assert run.oracle.fit_together is fits


@pytest.mark.parametrize(
    ("pools", "text"), [((6, 2), "adds up to the limit blocks, 9"), ((9, 0), "the limit pools is at least 1")]
)
def test_pools_are_all_blocks(pools: tuple[int, ...], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Limits(block_size=4, blocks=9, pools=pools, batch_tokens=16, batch_requests=3, context_tokens=32)
