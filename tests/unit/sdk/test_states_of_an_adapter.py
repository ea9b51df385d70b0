"""Layers that keep one state of all tokens before: a request goes on from its own, in the block where it was left.

Goal: nobody goes on from another state, from one of before a flush, or from one of the same batch. Method: plans
written by hand. Origin: vLLM's hybrid models, pull requests 51113 and 51603. Mutant: in `SimulatedRunner`, look at no
state, or write states before others are read.
"""

from __future__ import annotations

import pytest
from planned_run import PlannedRun, answered, share

from scripted.sdk import FlushCache, StateTable, Violation


def states(*blocks: int) -> tuple[StateTable, ...]:
    return (StateTable(block_ids=blocks, tokens=4),)


def after_a_block() -> PlannedRun:
    """A request has computed four of its eight tokens; the state after them is in block 5."""
    run = PlannedRun(flush=True)
    run.add("a", prompt=8, new=2)
    run.launch("a", 0, 4, 1, states=states(5))
    return run


def test_a_request_goes_on_from_the_state_that_it_left() -> None:
    run = after_a_block()
    run.launch("a", 4, 3, 1, 2, states=states(5, 6))
    run.launch("a", 7, 1, 1, 2, states=states(0, 6))


def test_a_state_in_another_block_is_not_its_own() -> None:
    run = after_a_block()
    with pytest.raises(Violation, match=r"block 7 of \[7, 6\] does not hold the state after its first 4 tokens"):
        run.step(share("a", 4, 4, 1, 2, states=states(7, 6)))


def test_a_block_that_was_written_since_holds_no_state() -> None:
    run = after_a_block()
    run.add("b", prompt=4, seed=1)
    run.launch("b", 0, 4, 5, states=states(7))
    with pytest.raises(Violation, match="continues from the wrong state"):
        run.step(share("a", 4, 4, 1, 2, states=states(5, 6)))


def test_the_state_of_an_equal_prefix_will_do_but_not_one_of_the_same_batch() -> None:
    run = after_a_block()
    run.add("b", prompt=8)
    run.step(share("a", 4, 4, 1, 2, states=states(5, 6)), share("b", 4, 3, 1, 3, states=states(5, 7)))
    run = PlannedRun()
    run.add("a", prompt=8)
    run.add("b", prompt=8)
    with pytest.raises(Violation, match="b continues from the wrong state"):
        run.step(share("a", 0, 4, 1, states=states(5)), share("b", 4, 4, 1, 3, states=states(5, 7)))


def test_what_is_copied_is_copied_with_its_state() -> None:
    run = after_a_block()
    run.step(share("a", 4, 4, 1, 2, states=states(7, 6)), copies=((5, 7),))


def test_a_state_of_before_a_flush_is_nobodys() -> None:
    run = after_a_block()
    run.events.append(FlushCache(call_id="1"))
    with pytest.raises(Violation, match="a goes on from a state of before the cache was flushed, in block 5"):
        run.step(share("a", 4, 4, 1, 2, states=states(5, 6)), replies=(answered("1"),))


def test_two_requests_leave_their_states_in_two_blocks() -> None:
    run = PlannedRun()
    run.add("a", prompt=4)
    run.add("b", prompt=4, seed=1)
    with pytest.raises(Violation, match="writes block 5 for a and for b"):
        run.step(share("a", 0, 4, 1, states=states(5)), share("b", 0, 4, 2, states=states(5)))


def test_there_is_a_block_for_the_state_after_a_share() -> None:
    run = PlannedRun()
    run.add("a", prompt=8)
    with pytest.raises(Violation, match=r"has no block for the state after them: \[5\]"):
        run.step(share("a", 0, 8, 1, 2, states=states(5)))
