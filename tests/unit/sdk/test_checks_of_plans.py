"""The checks of every scheduler's plans, one by one: positions, batches and guesses.

A right plan passes, a wrong one is refused in words. Each wrong plan differs from a right one in what its test names.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from planned_run import LIMITS, PlannedRun, alone, answered, planned_run, refused, share, told

from scripted.sdk import BatchResult, FlushCache, Violation


@pytest.fixture
def run() -> PlannedRun:
    return planned_run()


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
    with refused(r"a is launched, but it was aborted; Capabilities\(late_launches=1\) says"):
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


@pytest.mark.parametrize("continuous", [True, False])
def test_static_batching_lets_requests_wait_that_fit(*, continuous: bool) -> None:
    """F: a scheduler that begins nothing while a batch runs was reported for every request that waits for its end."""
    run = PlannedRun(continuous=continuous)
    run.add("a")
    run.add("b", seed=1)
    run.step(share("a", 0, 6, 0, 1))
    assert run.oracle.fit_together is continuous


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


def test_guesses_without_the_token_before_them() -> None:
    """It was an IndexError of the harness: vLLM's scheduler may count a position as computed that was not."""
    run = PlannedRun(speculative_tokens=2)
    first, second, *_ = alone(run.add("a", 4, new=6))
    run.launch("a", 0, 4, 0)
    run.step(share("a", 4, 1, 0, 1), replies=(told("a", first),))
    with refused("a computes position 6 too early: position 5 comes next"):
        run.step(share("a", 6, 1, 0, 1, draft_ids=(second,)))


def test_guesses_in_the_middle_of_a_prompt() -> None:
    run = PlannedRun(speculative_tokens=2)
    run.add("a", 6)
    with refused("a computes positions 0 to 3 with 1 guesses, but has 6 tokens"):
        run.step(share("a", 0, 4, 0, draft_ids=(65,)))
