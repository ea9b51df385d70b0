"""The checks that hold for every scheduler, one by one: a plan that is right passes, a wrong one is refused in words.

Each wrong plan differs from a right one in the one thing that its test is named after.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from planned_run import LIMITS, PlannedRun, alone, answered, share, told

from scripted.core.promises import CachedPrefix
from scripted.sdk import (
    Add,
    BatchFailed,
    BatchResult,
    FlushCache,
    Pause,
    PauseMode,
    Refused,
    Resume,
    Sleep,
    Stepped,
    Violation,
    Wake,
)

STOP = PauseMode(name="stop")
KEEP = PauseMode(name="keep", stops_running=False)
ABORT = PauseMode(name="abort", aborts=True)


@pytest.fixture
def run() -> PlannedRun:
    return PlannedRun(pause_modes=(STOP, KEEP, ABORT), fail=True)


def refused(words: str):
    return pytest.raises(Violation, match=words)


def test_a_request_from_its_first_chunk_to_its_end(run: PlannedRun) -> None:
    """The correct run of which all wrong plans of this file are variations."""
    a = run.add("a", 6)
    first, second = alone(a)
    run.launch("a", 0, 4, 0)
    run.launch("a", 4, 2, 0, 1)
    run.step(replies=(told("a", first),))
    run.launch("a", 6, 1, 0, 1)
    run.step(replies=(told("a", second, end="length"),))
    assert run.oracle.is_settled
    run.oracle.at_rest(run.machine)
    run.abort("unknown")
    run.step()
    run.oracle.at_end(run.machine)


# -- positions --


def test_a_position_again(run: PlannedRun) -> None:
    run.add("a")
    run.launch("a", 0, 4, 0)
    with refused("a computes position 3 again: position 4 comes next"):
        run.step(share("a", 3, 3, 0, 1))


def test_a_position_that_is_skipped(run: PlannedRun) -> None:
    run.add("a")
    run.launch("a", 0, 4, 0)
    with refused("a computes position 5 too early: position 4 comes next"):
        run.step(share("a", 5, 1, 0, 1))


def test_no_position_at_all(run: PlannedRun) -> None:
    run.add("a")
    with refused("a computes 0 positions from 0 on"):
        run.step(share("a", 0, 0, 0))


def test_a_start_left_open_without_guesses(run: PlannedRun) -> None:
    """F: -1 stood for any next position, so a scheduler without guesses could get every start wrong."""
    run.add("a")
    with pytest.raises(Violation, match="a computes 6 positions from -1 on"):
        run.step(share("a", -1, 6, 0, 1))


def test_positions_before_their_tokens_are_there(run: PlannedRun) -> None:
    run.add("a", 4)
    with refused("a computes positions 0 to 5 with 0 guesses, but has 4 tokens"):
        run.step(share("a", 0, 6, 0, 1))


def test_positions_beyond_the_context() -> None:
    run = PlannedRun(replace(LIMITS, context_tokens=6))
    run.add("a", 8)
    with refused("a computes positions 0 to 7, beyond its context of 6 tokens"):
        run.step(share("a", 0, 8, 0, 1))


def test_after_a_preemption_positions_come_again(run: PlannedRun) -> None:
    run.add("a")
    run.launch("a", 0, 4, 0)
    run.step(preempted=("a",))
    run.step(share("a", 0, 6, 2, 3))


# -- batches --


def test_too_many_tokens_in_a_batch(run: PlannedRun) -> None:
    run.add("a", 20)
    with refused("batch 1 computes 17 tokens, of at most 16"):
        run.step(share("a", 0, 17, 0, 1, 2, 3, 4))


def test_too_many_requests_in_a_batch(run: PlannedRun) -> None:
    for number in range(4):
        run.add(f"r{number}", 4, seed=number)
    with refused("batch 1 has 4 requests, of at most 3"):
        run.step(*(share(f"r{number}", 0, 4, number) for number in range(4)))


@pytest.mark.parametrize("takes_seats", [True, False])
def test_an_aborted_request_beside_a_full_batch(*, takes_seats: bool) -> None:
    """Where what has ended takes no seat, it may be launched beside as many as fit; without, the finding says so."""
    run = PlannedRun(late_launches=1, ended_take_seats=takes_seats)
    for number in range(4):
        run.add(f"r{number}", 4, seed=number)
    run.launch("r0", 0, 4, 0)
    run.abort("r0")
    batch = [share("r0", 4, 1, 0, 9), *(share(f"r{number}", 0, 4, number) for number in range(1, 4))]
    if takes_seats:
        with refused(r"of at most 3; clients have aborted r0: Capabilities\(ended_take_seats=False\)"):
            run.step(*batch)
    else:
        run.step(*batch)


def test_seats_of_live_requests_are_counted_all_the_same() -> None:
    run = PlannedRun(late_launches=1, ended_take_seats=False)
    for number in range(4):
        run.add(f"r{number}", 4, seed=number)
    with refused("batch 1 has 4 requests, of at most 3$"):
        run.step(*(share(f"r{number}", 0, 4, number) for number in range(4)))


# -- kept logits --


def _after_an_equal_prompt(*, kept: bool) -> tuple[PlannedRun, tuple[int, ...]]:
    """Make a run in which a prompt was computed, and one like it has arrived."""
    run = PlannedRun(kept_logits=kept)
    first = alone(run.add("a", 4, new=1))
    run.launch("a", 0, 4, 0)
    run.step(replies=(told("a", *first, end="length"),))
    return run, alone(run.add("b", 4))


def test_a_first_token_from_kept_logits() -> None:
    """The next one is computed from the cached prompt and that token."""
    run, (first, second) = _after_an_equal_prompt(kept=True)
    run.step(replies=(told("b", first),))
    run.launch("b", 4, 1, 0, 1)
    run.step(replies=(told("b", second, end="length"),))
    assert run.oracle.is_settled


def test_a_first_token_without_a_launch_where_nothing_is_declared() -> None:
    run, (first, _) = _after_an_equal_prompt(kept=False)
    with refused(r"nothing of it was ever computed; an equal prompt was: Capabilities\(kept_logits=True\)"):
        run.step(replies=(told("b", first),))


def test_logits_that_were_flushed() -> None:
    run, (first, _) = _after_an_equal_prompt(kept=True)
    run.events.append(FlushCache(call_id="f"))
    run.step(replies=(answered("f"),))
    with refused("b is told its first token without a launch, but no logits can be kept"):
        run.step(replies=(told("b", first),))


def test_kept_logits_of_another_prompt() -> None:
    run, (first, _) = _after_an_equal_prompt(kept=True)
    with refused("b says"):
        run.step(replies=(told("b", first + 1),))


def test_a_request_twice_in_a_batch(run: PlannedRun) -> None:
    run.add("a")
    with refused("batch 1 has a request twice: a, a"):
        run.step(share("a", 0, 4, 0), share("a", 4, 2, 0, 1))


def test_more_batches_in_flight_than_the_depth(run: PlannedRun) -> None:
    for number in range(3):
        run.add(f"r{number}", 4, seed=number)
    run.step(share("r0", 0, 4, 0))
    run.step(share("r1", 0, 4, 1))
    with refused("3 batches are in flight, of at most 2"):
        run.step(share("r2", 0, 4, 2))


def test_a_batch_with_the_id_of_another_in_flight(run: PlannedRun) -> None:
    run.add("a", 4)
    run.add("b", 4, seed=1)
    run.step(share("a", 0, 4, 0), name=7)
    with refused("batch 7 is launched, but one of this id is in flight"):
        run.step(share("b", 0, 4, 1), name=7)


def test_a_request_that_never_arrived(run: PlannedRun) -> None:
    with refused("ghost is launched, but never arrived"):
        run.step(share("ghost", 0, 4, 0))


def test_a_request_that_has_ended(run: PlannedRun) -> None:
    a = run.add("a", 4, new=1)
    run.launch("a", 0, 4, 0)
    run.step(replies=(told("a", *alone(a), end="length"),))
    with refused("a is launched, but has ended"):
        run.step(share("a", 4, 1, 0, 1))


def test_a_request_that_was_aborted(run: PlannedRun) -> None:
    run.add("a")
    run.launch("a", 0, 4, 0)
    run.abort("a")
    with refused("a is launched, but it was aborted"):
        run.step(share("a", 4, 2, 0, 1))


def test_a_prompt_that_is_cut_where_that_is_not_declared() -> None:
    run = PlannedRun(chunked=False)
    run.add("a")
    with refused("a computes a part of its prompt, but prompts are not to be cut"):
        run.step(share("a", 0, 4, 0))


def test_more_loras_in_a_batch_than_go_together() -> None:
    run = PlannedRun(loras_together=1)
    run.add("a", 4, lora=1)
    run.add("b", 4, seed=1, lora=2)
    with refused("batch 1 has requests of 2 LoRAs, of at most 1"):
        run.step(share("a", 0, 4, 0), share("b", 0, 4, 1))


# -- blocks and what is read --


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


# -- guesses --


def test_guesses_are_verified_and_the_right_ones_count() -> None:
    run = PlannedRun(speculative_tokens=2)
    a = run.add("a", 4, new=6)
    first, second, *_ = alone(a)
    run.launch("a", 0, 4, 0)
    run.step(share("a", 4, 2, 0, 1, draft_ids=(second,)), replies=(told("a", first),))
    result = run.take_result()
    assert isinstance(result, BatchResult)
    assert result.token_ids == (alone(a)[1:3],)
    run.step(share("a", 6, 1, 0, 1), replies=(told("a", *alone(a)[1:3]),))


def test_a_guess_that_was_wrong_is_computed_again() -> None:
    run = PlannedRun(speculative_tokens=2)
    a = run.add("a", 4, new=6)
    first, second, *_ = alone(a)
    wrong = second + 1
    run.launch("a", 0, 4, 0)
    run.step(share("a", 4, 2, 0, 1, draft_ids=(wrong,)), replies=(told("a", first),))
    assert run.take_result().token_ids == ((second,),)
    with refused("a computes position 6 too early: position 5 comes next"):
        run.step(share("a", 6, 1, 0, 1), replies=(told("a", second),))


def test_a_guess_that_is_told_although_it_was_wrong() -> None:
    run = PlannedRun(speculative_tokens=2)
    a = run.add("a", 4, new=6)
    first, second, *_ = alone(a)
    run.launch("a", 0, 4, 0)
    run.step(share("a", 4, 2, 0, 1, draft_ids=(second + 1,)), replies=(told("a", first),))
    run.take_result()
    with refused("a says .*, but alone it says"):
        run.step(replies=(told("a", second + 1),))


def test_guesses_in_the_middle_of_a_prompt() -> None:
    run = PlannedRun(speculative_tokens=2)
    run.add("a", 6)
    with refused("a computes positions 0 to 3 with 1 guesses, but has 6 tokens"):
        run.step(share("a", 0, 4, 0, draft_ids=(65,)))


# -- what clients are told --


def test_a_changed_token(run: PlannedRun) -> None:
    a = run.add("a", 4)
    run.launch("a", 0, 4, 0)
    with refused(r"a says \[1\], but alone it says"):
        run.step(replies=(told("a", 1),))
    assert alone(a)[0] != 1


def test_a_doubled_token(run: PlannedRun) -> None:
    a = run.add("a", 4, new=3)
    first = alone(a)[0]
    assert alone(a)[1] != first
    run.launch("a", 0, 4, 0)
    run.step(replies=(told("a", first),))
    with refused("a says .*, but alone it says"):
        run.step(replies=(told("a", first),))


@pytest.mark.parametrize("reason", [None, "length"])
def test_a_token_too_many_is_told_with_the_limit(run: PlannedRun, reason: str | None) -> None:
    """The same overrun had one text with an end and another without."""
    a = run.add("a", 4, new=1)
    run.launch("a", 0, 4, 0)
    with refused(r"a says \[\d+, 1\], but alone it says \[\d+\]: 2 tokens, of at most 1$"):
        run.step(replies=(told("a", alone(a)[0], 1, end=reason),))


def test_a_token_that_nothing_computed(run: PlannedRun) -> None:
    a = run.add("a", 4)
    with refused("a is told tokens, but nothing of it was ever computed"):
        run.step(replies=(told("a", alone(a)[0]),))


def test_tokens_after_the_end(run: PlannedRun) -> None:
    a = run.add("a", 4, new=1)
    run.launch("a", 0, 4, 0)
    run.step(replies=(told("a", *alone(a), end="length"),))
    with refused(r"a is told \[65\] \(None\), but it has ended \(length\)"):
        run.step(replies=(told("a", 65),))


def test_a_second_end(run: PlannedRun) -> None:
    a = run.add("a", 4, new=1)
    run.launch("a", 0, 4, 0)
    run.abort("a")
    with refused(r"a is told \[\] \(abort\), but it has ended \(length\)"):
        run.step(replies=(told("a", *alone(a), end="length"), told("a", end="abort")))


def test_an_end_too_early(run: PlannedRun) -> None:
    a = run.add("a", 4)
    run.launch("a", 0, 4, 0)
    with refused("a ends with length after .*, but alone it says"):
        run.step(replies=(told("a", alone(a)[0], end="length"),))


def test_an_end_for_the_wrong_reason(run: PlannedRun) -> None:
    a = run.add("a", 4, new=1)
    run.launch("a", 0, 4, 0)
    with refused("a ends with stop after .*: length"):
        run.step(replies=(told("a", *alone(a), end="stop"),))


def test_an_end_at_a_stop_token(run: PlannedRun) -> None:
    first = alone(run.add("a", 4))[0]
    stopped = run.add("b", 4, stop=(first,))
    assert alone(stopped) == (first,)
    run.launch("b", 0, 4, 0)
    with refused("b ends with length after .*: stop"):
        run.step(replies=(told("b", first, end="length"),))


def test_an_end_for_a_reason_that_there_is_not(run: PlannedRun) -> None:
    run.add("a")
    with refused("a ends with 'tired', which is not length, stop, abort or error"):
        run.step(replies=(told("a", end="tired"),))


def test_an_abort_that_no_client_asked_for(run: PlannedRun) -> None:
    run.add("a")
    with refused("a ends with abort, but nothing aborted it"):
        run.step(replies=(told("a", end="abort"),))


def test_an_error_although_no_batch_failed(run: PlannedRun) -> None:
    run.add("a")
    with refused("a ends with an error, but no batch of it failed"):
        run.step(replies=(told("a", end="error"),))


def test_an_error_of_a_batch_that_failed(run: PlannedRun) -> None:
    run.add("a", 4)
    run.pipeline.fail_next_batch()
    run.launch("a", 0, 4, 0)
    run.step(replies=(told("a", end="error"),))
    assert run.oracle.is_settled


def test_a_refusal_before_it_began_and_one_after(run: PlannedRun) -> None:
    run.add("a")
    run.step(replies=(Refused(rid="a", reason="full"),))
    assert run.oracle.is_settled
    run.add("b")
    run.launch("b", 0, 4, 0)
    with refused(r"b is refused \(full\) after it had begun"):
        run.step(replies=(Refused(rid="b", reason="full"),))


def test_a_reply_to_a_request_that_never_was(run: PlannedRun) -> None:
    with refused("ghost is refused, but there is no such request"):
        run.step(replies=(Refused(rid="ghost", reason="full"),))


def test_an_answer_twice_and_one_to_no_call(run: PlannedRun) -> None:
    run.events.append(FlushCache(call_id="flush"))
    run.step(replies=(answered("flush"),))
    with refused("the call flush is answered, but it was answered before"):
        run.step(replies=(answered("flush"),))
    with refused("the call other is answered, but it was never made"):
        run.step(replies=(answered("other"),))


def test_an_aborted_request_ends_at_once_where_aborts_are_not_answered() -> None:
    run = PlannedRun(answers_aborts=False)
    run.add("a")
    run.launch("a", 0, 4, 0)
    run.abort("a")
    run.step()
    assert run.oracle.is_settled
    with refused(r"a is told \[\] \(abort\), but it has ended \(abort\)"):
        run.step(replies=(told("a", end="abort"),))


def test_an_aborted_request_is_launched_as_often_as_is_declared() -> None:
    run = PlannedRun(late_launches=1)
    run.add("a")
    run.launch("a", 0, 4, 0)
    run.abort("a")
    run.launch("a", 4, 2, 0, 1)
    with refused("a is launched, but it was aborted 1 launches ago"):
        run.launch("a", 6, 1, 0, 1)


# -- pauses --


def test_a_launch_while_paused(run: PlannedRun) -> None:
    run.add("a")
    run.events.append(Pause(call_id="pause", mode="stop"))
    with refused(r"batch 1 is launched while generation is paused \(stop\)"):
        run.step(share("a", 0, 4, 0), replies=(answered("pause"),))


def test_a_request_that_begins_while_beginning_is_paused(run: PlannedRun) -> None:
    run.add("a")
    run.launch("a", 0, 4, 0)
    run.add("b", 4, seed=1)
    run.events.append(Pause(call_id="pause", mode="keep"))
    run.step(share("a", 4, 2, 0, 1), replies=(answered("pause"),))
    run.take_result()
    with refused(r"b begins in batch 3 while generation is paused \(keep\)"):
        run.step(share("b", 0, 4, 2))


def test_after_a_pause_launches_go_on(run: PlannedRun) -> None:
    run.add("a")
    run.events.append(Pause(call_id="pause", mode="stop"))
    run.step(replies=(answered("pause"),))
    run.events.append(Resume(call_id="go"))
    run.step(share("a", 0, 4, 0), replies=(answered("go"),))


def test_a_pause_that_aborts_ends_what_is_alive(run: PlannedRun) -> None:
    run.add("a")
    run.step()
    run.events.append(Pause(call_id="pause", mode="abort"))
    run.step(replies=(answered("pause"), told("a", end="abort")))
    assert run.oracle.is_settled


# -- sleeps --


def asleep(*names: str, **more: object) -> PlannedRun:
    """A run in which a has computed its prompt, and these calls to sleep were answered since."""
    run = PlannedRun(pause_modes=(STOP,), sleep_modes=("", "stop"), **more)
    run.add("a", 4)
    run.launch("a", 0, 4, 0)
    for name in names:
        run.events.append(Sleep(call_id=name))
        run.step(replies=(answered(name),))
    return run


def test_a_launch_while_the_device_sleeps() -> None:
    """A part of the memory is not enough, and a second sleep is no wake."""
    run = asleep("s", "t")
    run.events.append(Wake(call_id="w", part="weights"))
    run.step(replies=(replace(answered("w"), ok=False),))
    with refused("batch 2 is launched while the device sleeps: t released its memory, and no wake has brought all"):
        run.step(share("a", 4, 1, 0, 1))


def test_a_sleep_over_a_batch_in_flight() -> None:
    run = asleep()
    run.step(share("a", 4, 1, 0, 1))
    run.events.append(Sleep(call_id="s"))
    with refused("s releases the device's memory, but batch 2 is in flight there"):
        run.step(replies=(answered("s"),))


def test_a_pause_behind_a_wake_in_one_step_stays() -> None:
    run = asleep(wakes_resume=True)
    run.events += [Wake(call_id="w"), Pause(call_id="p", mode="stop")]
    run.step(replies=(answered("w"), answered("p")))
    assert run.oracle.paused == STOP


@pytest.mark.parametrize("preempted", [(), ("a",)])
def test_kv_of_before_a_sleep_is_gone(preempted: tuple[str, ...]) -> None:
    run = asleep("s")
    run.events.append(Wake(call_id="w"))
    run.step(replies=(answered("w"),), preempted=preempted)
    if preempted:
        run.launch("a", 0, 5, 0, 1)
        return
    with refused("a reads block 0, which was written before the cache was flushed"):
        run.step(share("a", 4, 1, 0, 1))


@pytest.mark.parametrize("resumes", [True, False])
def test_a_wake_ends_a_pause_where_that_is_declared(*, resumes: bool) -> None:
    run = asleep(wakes_resume=resumes)
    run.events.append(Sleep(call_id="s", mode="stop"))
    run.step(replies=(answered("s"),), preempted=("a",))
    run.events.append(Wake(call_id="w"))
    run.step(replies=(answered("w"),))
    if resumes:
        run.launch("a", 0, 5, 0, 1)
        return
    with refused(r"batch 2 is launched while generation is paused \(stop\)"):
        run.step(share("a", 0, 5, 0, 1))


# -- the end --


def test_a_request_that_waits_for_ever(run: PlannedRun) -> None:
    run.add("a")
    run.step()
    with refused(r"nothing happens any more, but something waits for ever: a \(waiting\)"):
        run.oracle.at_rest(run.machine)


def test_a_call_that_is_never_answered(run: PlannedRun) -> None:
    run.events.append(FlushCache(call_id="flush"))
    run.step()
    with refused("nothing happens any more, but something waits for ever: flush"):
        run.oracle.at_rest(run.machine)


def test_an_abort_of_no_request_that_changes_a_count(run: PlannedRun) -> None:
    run.oracle.at_rest(run.machine)
    run.abort("unknown")
    run.machine.numbers["waiting"] = 1
    with refused("an abort of a request that is not alive changed waiting 0 to 1"):
        run.step()


def test_blocks_that_do_not_come_back(run: PlannedRun) -> None:
    run.machine.numbers["blocks_free"] = 7
    with refused("everything has ended, but blocks_free is 7 instead of 8"):
        run.oracle.at_end(run.machine)


def test_a_dict_that_has_grown(run: PlannedRun) -> None:
    run.machine.requests["a"] = 1
    with refused(r"machine.requests has 1 entries, in a new one 0; may_grow=\('machine.requests',\) says that it may"):
        run.oracle.at_end(run.machine)


def test_a_scheduler_that_is_not_idle_in_the_end(run: PlannedRun) -> None:
    run.machine.is_idle = False
    with refused("everything has ended, but the scheduler is not idle: waiting=0 blocks_free=8"):
        run.oracle.at_end(run.machine)


@pytest.mark.parametrize("continuous", [True, False])
def test_static_batching_lets_requests_wait_that_fit(*, continuous: bool) -> None:
    """F: a scheduler that begins nothing while a batch runs was reported for every request that waits for its end."""
    run = PlannedRun(continuous=continuous)
    run.add("a")
    run.add("b", seed=1)
    run.step(share("a", 0, 6, 0, 1))
    assert run.oracle.fit_together is continuous


def test_a_cached_prefix_of_before_a_flush(run: PlannedRun) -> None:
    a = run.add("a", 4)
    run.launch("a", 0, 4, 0)
    prefix = CachedPrefix(a.prompt_ids, (0,))
    assert run.pipeline.wrong_block(prefix) is None
    run.events.append(FlushCache(call_id="f"))
    run.step(replies=(answered("f"),))
    assert run.pipeline.wrong_block(prefix) == 0


def test_a_pause_in_its_turn_aborts_nobody_who_came_during_the_one_before() -> None:
    run = PlannedRun(pause_modes=(KEEP, ABORT), pauses_in_turn=True)
    a = run.add("a", 4)
    run.launch("a", 0, 4, 0)
    run.events.append(Pause(call_id="p", mode="keep"))
    run.step(replies=(told("a", alone(a)[0]), answered("p")))
    run.add("b", 4, seed=1)
    run.events.append(Pause(call_id="q", mode="abort"))
    run.step(replies=(told("a", end="abort"), answered("q")))
    run.events.append(Resume(call_id="r"))
    run.step(replies=(answered("r"),))
    run.launch("b", 0, 4, 1)
