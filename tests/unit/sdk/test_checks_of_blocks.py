"""The checks of the blocks in every scheduler's plans: each request reads its own KV, and writes where it may."""

from __future__ import annotations

import pytest
from planned_run import PlannedRun, alone, answered, planned_run, refused, share, told

from scripted.core.promises import CachedPrefix
from scripted.sdk import Add, BatchFailed, FlushCache, Stepped


@pytest.fixture
def run() -> PlannedRun:
    return planned_run()


def test_a_block_in_two_tails(run: PlannedRun) -> None:
    run.add("a", 4)
    run.add("b", 4)
    with refused(r"batch 1 writes block 5 for a and for b; both write the same: Capabilities\(equal_writes=True\)"):
        run.step(share("a", 0, 4, 5), share("b", 0, 4, 5))


def test_a_block_that_is_written_alike_for_two_requests_where_that_is_declared() -> None:
    """Content that differs stays a finding."""
    run = PlannedRun(equal_writes=True)
    run.add("a", 4)
    run.add("b", 4)
    run.step(share("a", 0, 4, 5), share("b", 0, 4, 5))
    run = PlannedRun(equal_writes=True)
    run.add("a", 4)
    run.add("b", 4, seed=1)
    with refused("batch 1 writes block 5 for a and for b$"):
        run.step(share("a", 0, 4, 5), share("b", 0, 4, 5))


def test_a_block_twice_in_one_table(run: PlannedRun) -> None:
    run.add("a")
    with refused(r"a has a block twice: \[3, 3\]"):
        run.step(share("a", 0, 6, 3, 3))


def test_a_table_without_room(run: PlannedRun) -> None:
    run.add("a")
    with refused(r"a computes positions 0 to 5, but has room for 4 in its blocks \[0\]"):
        run.step(share("a", 0, 6, 0))


def test_kv_of_another_request(run: PlannedRun) -> None:
    run.add("a", 4)
    run.add("b", 6, seed=1)
    run.launch("a", 0, 4, 0)
    with refused("b reads the wrong KV: slot 0 of block 0, its position 0, was written for a"):
        run.step(share("b", 4, 2, 0, 1))


def test_kv_of_another_lora() -> None:
    run = PlannedRun(loras_together=1)
    run.add("a", 4, lora=1)
    run.launch("a", 0, 4, 0)
    run.add("b", 6, lora=1)
    run.launch("b", 4, 2, 0, 1)
    run.add("c", 6, lora=2)
    with refused("c reads the wrong KV: slot 0 of block 0"):
        run.step(share("c", 4, 2, 0, 1))


def test_what_goes_on_from_a_batch_that_failed_fails(run: PlannedRun) -> None:
    run.add("a", 8)
    run.pipeline.fail_next_batch()
    run.step(share("a", 0, 4, 0))
    run.step(share("a", 4, 4, 0, 1))
    assert isinstance(run.take_result(), BatchFailed)
    assert isinstance(run.take_result(), BatchFailed)
    run.step()
    run.launch("a", 0, 8, 0, 1)


@pytest.mark.parametrize(("end", "tokens"), [("length", 3), ("abort", 2)])
def test_a_session_goes_on_when_its_request_ended_by_itself(run: PlannedRun, end: str, tokens: int) -> None:
    run.pipeline.begin(Add(rid="a", prompt_ids=(1, 2), max_new_tokens=1, session=2))
    run.pipeline.begin(Add(rid="a", prompt_ids=(1, 2, 3), max_new_tokens=1, session=1), is_queued=True)
    run.pipeline.follow((), Stepped(replies=(told("a", end=end),)))
    assert run.pipeline.known_tokens("a") == tokens


def test_kv_that_was_never_written(run: PlannedRun) -> None:
    run.add("a", 6)
    with refused("a reads the wrong KV: slot 0 of block 6, its position 0, was never written"):
        run.step(share("a", 4, 2, 6, 1))


def test_a_block_that_another_has_written_over(run: PlannedRun) -> None:
    run.add("a", 5)
    run.add("b", 4, seed=1)
    run.launch("a", 0, 4, 0)
    run.launch("b", 0, 4, 0)
    with refused("a reads the wrong KV: slot 0 of block 0, its position 0, was written for b"):
        run.step(share("a", 4, 1, 0, 1))


def swap_out(run: PlannedRun) -> None:
    """Copy the KV of ``a`` to the host's blocks 100 and 101, and write its device blocks for ``b``."""
    run.add("a"), run.add("b", seed=1)
    run.launch("a", 0, 6, 0, 1)
    run.step(share("b", 0, 6, 0, 1), copies=((0, 100), (1, 101)))
    run.take_result()


def test_a_request_that_is_swapped_out_and_in(run: PlannedRun) -> None:
    """B06: it goes on in other blocks, with the copies."""
    swap_out(run)
    run.step(share("a", 6, 1, 2, 3), copies=((100, 2), (101, 3)))


@pytest.mark.parametrize("copies", [(), ((101, 2), (100, 3)), ((100, 2),), ((102, 2), (103, 3)), ((0, 2), (1, 3))])
def test_a_request_that_is_swapped_in_wrong(run: PlannedRun, copies: tuple[tuple[int, int], ...]) -> None:
    """B06: not at all, in the wrong order, in part, from blocks that never were, from those of another."""
    swap_out(run)
    with refused("a reads the wrong KV"):
        run.step(share("a", 6, 1, 2, 3), copies=copies)


def test_a_copy_from_before_a_flush(run: PlannedRun) -> None:
    """B15: a copy is as old as what it is a copy of."""
    a = run.add("a", 6, new=1)
    run.launch("a", 0, 6, 0, 1)
    run.step(replies=(told("a", *alone(a), end="length"),))
    run.events.append(FlushCache(call_id="flush"))
    run.step(replies=(answered("flush"),))
    run.add("b", 7)
    with refused("b reads block 2, which was written before the cache was flushed"):
        run.step(share("b", 4, 3, 2, 3), copies=((0, 2),))


def test_an_equal_prefix_may_be_shared(run: PlannedRun) -> None:
    run.add("a", 6)
    run.add("b", 7)
    run.launch("a", 0, 6, 0, 1)
    run.step(share("b", 4, 3, 0, 2))


def test_an_equal_prefix_from_before_a_flush(run: PlannedRun) -> None:
    a = run.add("a", 6, new=1)
    run.launch("a", 0, 6, 0, 1)
    run.step(replies=(told("a", *alone(a), end="length"),))
    run.events.append(FlushCache(call_id="flush"))
    run.step(replies=(answered("flush"),))
    run.add("b", 7)
    with refused("b reads block 0, which was written before the cache was flushed"):
        run.step(share("b", 4, 3, 0, 2))


def test_a_flush_under_a_request_that_goes_on(run: PlannedRun) -> None:
    """G01: it reads KV written before the flush that dropped it."""
    a = run.add("a", 6)
    run.launch("a", 0, 6, 0, 1)
    run.events.append(FlushCache(call_id="flush"))
    run.step(replies=(told("a", alone(a)[0]), answered("flush")))
    with refused("a reads block 0, which was written before the cache was flushed"):
        run.step(share("a", 6, 1, 0, 1))


def test_a_flush_that_was_refused_forbids_nothing(run: PlannedRun) -> None:
    run.add("a", 6, new=1)
    run.launch("a", 0, 6, 0, 1)
    run.events.append(FlushCache(call_id="flush"))
    run.step(replies=(answered("flush", ok=False),))
    run.add("b", 7)
    run.step(share("b", 4, 3, 0, 2))


def test_tokens_that_the_plan_states_and_the_request_has_not(run: PlannedRun) -> None:
    a = run.add("a", 4)
    with refused(r"a computes the tokens \[1, 2, 3, 4\] from position 0 on, but has"):
        run.step(share("a", 0, 4, 0, token_ids=(1, 2, 3, 4)))
    other = PlannedRun()
    other.add("a", 4)
    other.step(share("a", 0, 4, 0, token_ids=(*a.prompt_ids[:3], -1)))


def test_a_cached_prefix_of_before_a_flush(run: PlannedRun) -> None:
    a = run.add("a", 4)
    run.launch("a", 0, 4, 0)
    prefix = CachedPrefix(a.prompt_ids, (0,))
    assert run.pipeline.wrong_block(prefix) is None
    run.events.append(FlushCache(call_id="f"))
    run.step(replies=(answered("f"),))
    assert run.pipeline.wrong_block(prefix) == 0


def test_requests_that_fit_exactly_may_wait_for_a_reserve_where_that_is_declared() -> None:
    """Two requests need all eight blocks; the finding names the declaration, and one that fits with it does not."""
    exact, reserved = PlannedRun(), PlannedRun(spare_blocks=1)
    for run in (exact, reserved):
        run.add("a", 12, new=4)
        run.add("b", 12, new=4)
        run.step()
    assert exact.oracle.fit_together
    assert exact.oracle.fit_hint.startswith("; Capabilities(spare_blocks=1) says that requests wait")
    assert not reserved.oracle.fit_together
    small = PlannedRun(spare_blocks=1)
    small.add("a", 12, new=4)
    small.add("b", 6)
    small.step()
    assert small.oracle.fit_together
    assert small.oracle.fit_hint.startswith("; Capabilities(spare_blocks=2)")
    fewer = PlannedRun()
    fewer.add("a", 12, new=4)
    fewer.step()
    assert fewer.oracle.fit_hint == ""
