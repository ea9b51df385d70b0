"""Layers that keep a state of all before, or the last tokens of a group, or of the output a window alone.

Goal: a share goes on from its own states, those behind guesses among them, and from its own ring; what is in the gap
of an output may be anything. Method: plans written by hand. Origin: vLLM's Mamba, circular buffers and R-SWA. Mutant:
in `SimulatedRunner._settle`, leave `tokens.ahead` at 0, or copy nothing; check no rings; in `_is_corrupt` look at the
gap too; in `SdkOracle._fit` count no more for states than for tokens.
"""

from __future__ import annotations

import pytest
from planned_run import PlannedRun, alone, share

from scripted.core.tokens import guesses
from scripted.sdk import Limits, Load, Ring, StateTable, Stepped, Violation


def states(*blocks: int, kept: tuple[int, int] = (0, 0)) -> dict[str, tuple[StateTable, ...]]:
    return {"states": (StateTable(block_ids=blocks, tokens=4, kept=kept),)}


def after_two_guesses(*blocks: int) -> PlannedRun:
    """A prompt of five, and then one with two guesses of which the first holds: positions 5 and 6 are computed."""
    run = PlannedRun(speculative_tokens=2)
    run.add("a", prompt=5, new=6)
    run.step(share("a", 0, 5, 1, 2, known_tokens=5, **states(0, 5, 6, 7)))
    (first, _) = run.take_result().draft_ids[0]
    run.step(share("a", 5, 3, 1, 2, draft_ids=(first, -1), **states(*blocks)))
    run.take_result()
    return run


def test_a_state_behind_a_guess_that_holds_is_gone_on_from() -> None:
    run = after_two_guesses(0, 5, 6, 7)
    run.step(share("a", 7, 1, 1, 2, **states(0, 5, 6, 7)))


def test_a_state_behind_a_guess_is_not_that_of_its_place() -> None:
    """The blocks behind the place changed theirs."""
    run = after_two_guesses(0, 5, 6, 7)
    with pytest.raises(Violation, match=r"continues from the wrong state: block 7 of \[0, 5, 7, 6\]"):
        run.step(share("a", 7, 1, 1, 2, **states(0, 5, 7, 6)))


def test_a_state_that_ends_a_block_is_copied_to_its_place() -> None:
    """Position 7 ends a block whose last share began before it: another request finds that state there."""
    run = PlannedRun(speculative_tokens=2)
    run.add("a", prompt=7, new=4)
    run.step(share("a", 0, 7, 1, 2, known_tokens=7, **states(0, 5, 6, 7)))
    (first, second) = run.take_result().draft_ids[0]
    assert (first, second) == guesses(run.pipeline._requests["a"].fingerprints[-1], 2, None)
    run.step(share("a", 7, 3, 1, 2, 3, draft_ids=(first, second), **states(0, 5, 6, 7, 8)))
    said = run.take_result().token_ids[0]
    assert len(said) > 1
    run.step(share("a", 7 + len(said), 1, 1, 2, 3, **states(0, 5, 6, 7, 8)))
    assert run.pipeline._states[5] == run.pipeline._requests["a"].fingerprints[8]


def test_states_need_a_block_for_each_guess() -> None:
    with pytest.raises(Violation, match="has no block for the state after them"):
        after_two_guesses(0, 5, 6)


def test_a_state_is_kept_inside_a_share() -> None:
    run = PlannedRun()
    run.add("a", prompt=8, new=2)
    run.step(share("a", 0, 8, 1, 2, **states(5, 6, kept=(4, 0))))
    run.take_result()
    run.add("b", prompt=6, new=1)
    run.step(share("b", 4, 2, 1, 3, **states(5, 7)))
    assert run.pipeline._states[5] == run.pipeline._requests["b"].fingerprints[4]


def ring(block: int) -> dict[str, tuple[Ring, ...]]:
    return {"rings": (Ring(block_id=block, tokens=4),)}


@pytest.mark.parametrize(("first", "block"), [(8, 6), (5, 5), (9, 5)])
def test_a_ring_holds_the_group_of_the_next_position(first: int, block: int) -> None:
    """A new group needs nothing of it; a share of more than the ring leaves the last positions."""
    run = PlannedRun()
    run.add("a", prompt=12, new=2)
    run.step(share("a", 0, first, 1, 2, 3, **ring(5)))
    run.take_result()
    run.step(share("a", first, 12 - first, 1, 2, 3, **ring(block)))


def test_a_ring_of_another_request_is_found() -> None:
    run = PlannedRun()
    run.add("a", prompt=8, new=2)
    run.step(share("a", 0, 6, 1, 2, **ring(5)))
    run.take_result()
    with pytest.raises(Violation, match="its ring, block 6, does not hold its position 4"):
        run.step(share("a", 6, 2, 1, 2, **ring(6)))


def test_nothing_is_read_of_the_gap() -> None:
    """With four prompt tokens and eight of output, only the last three are attended to; a block in between is gone."""
    run = PlannedRun()
    run.add("a", prompt=12, new=3)
    run.step(share("a", 0, 10, 1, 2, 3))
    run.take_result()
    run.step(share("a", 10, 2, 1, 0, 3, gap=(4, 8)))
    run = PlannedRun()
    run.add("a", prompt=12, new=3)
    run.step(share("a", 0, 10, 1, 2, 3))
    run.take_result()
    with pytest.raises(Violation, match="reads the wrong KV: slot 3 of block 0, its position 7"):
        run.step(share("a", 10, 2, 1, 0, 3, gap=(4, 7)))


@pytest.mark.parametrize(("gap", "is_right"), [((4, 8), True), ((4, 7), False), ((8, 8), False)])
def test_a_load_that_fails_in_a_block_of_the_gap_spoils_nothing(gap: tuple[int, int], is_right: bool) -> None:
    """The block was given away; the table of the request that had it names it still."""
    run = PlannedRun()
    a, b = run.add("a", prompt=12, new=3), run.add("b", prompt=6, seed=1)
    run.step(share("a", 0, 10, 1, 2, 3))
    run.take_result()
    lost = Load(rid="b", start=0, token_ids=b.prompt_ids[:4], block_ids=(2, 4), missing=(2,))
    run.step(share("a", 10, 2, 1, 2, 3, gap=gap), loads=(lost,))
    assert (run.take_result().token_ids == (alone(a)[:1],)) == is_right


@pytest.mark.parametrize(("guesses", "blocks", "fit"), [(0, 12, True), (0, 11, False), (2, 16, True), (2, 15, False)])
def test_requests_fit_with_all_places_of_their_states(guesses: int, blocks: int, fit: bool) -> None:
    """Two blocks of attention, four of states, and one more for each guess, for each of two requests."""
    limits = Limits(block_size=8, blocks=blocks, batch_tokens=16, batch_requests=3, context_tokens=32, depth=2)
    run = PlannedRun(limits, speculative_tokens=guesses)
    run.add("a", 12, new=4)
    run.add("b", 12, new=4, seed=1)
    run.step(share("a", 0, 8, 1, 2, known_tokens=12, **states(0, 5, 6, 7, 8, 9)))
    assert run.oracle.fit_together == fit


def test_guesses_that_the_scheduler_rejects_late_are_not_in_the_result() -> None:
    """The worker hears of its guesses after the launch: it samples after the last that holds, and guesses from there.

    Whoever takes the result in the step in which that is said has the whole one, and cuts it.
    """
    run = PlannedRun(speculative_tokens=2)
    run.add("a", prompt=5, new=6)
    run.step(share("a", 0, 5, 1, 2, known_tokens=5))
    run.take_result()
    run.step(share("a", 5, 3, 1, 2, draft_ids=(-1, -1)))
    assert run.pipeline.known_tokens("a") > 7
    run.pipeline.follow((), Stepped(verified=(("a", 0),)))
    result = run.take_result()
    tokens = run.pipeline._requests["a"]
    assert result.token_ids == ((tokens.ids[6],),)
    assert result.draft_ids == (guesses(tokens.fingerprints[7], 2, None),)
