"""KV that comes from outside: it is read like any other, and tokens from missing KV must not reach a client.

Goal: a scheduler with a KV connector is judged by the same promises. Method: plans written by hand. Origin: loads of
vLLM that fail. Mutant: none; each test has a plan that breaks the promise, or one that keeps it.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from planned_run import PlannedRun, alone, share

from scripted.core.tokens import tokens_alone
from scripted.sdk import Add, Answer, FlushCache, Load, Refused, StateTable, Tokens, Violation, Window


def load(message: Add, tokens: int, *blocks: int, missing: tuple[int, ...] = (), start: int = 0) -> Load:
    ids = message.prompt_ids[:tokens]
    return Load(rid=message.rid, start=start, token_ids=ids, block_ids=blocks, missing=missing)


def test_what_was_loaded_can_be_read() -> None:
    run = PlannedRun()
    a = run.add("a", 6)
    run.step(share("a", 4, 2, 1, 2), loads=(load(a, 4, 1, 2),))
    assert run.take_result().token_ids == (alone(a)[:1],)


def test_what_was_not_loaded_cannot() -> None:
    run = PlannedRun()
    run.add("a", 6)
    with pytest.raises(Violation, match="a reads the wrong KV"):
        run.step(share("a", 4, 2, 1, 2))


def test_a_token_that_was_computed_from_what_did_not_arrive_is_told() -> None:
    run = PlannedRun()
    a = run.add("a", 6)
    run.step(share("a", 4, 2, 1, 2), loads=(load(a, 4, 1, 2, missing=(1,)),))
    (said,) = run.take_result().token_ids
    assert said != tokens_alone(a.prompt_ids, 1, ())
    with pytest.raises(Violation, match="but alone it says"):
        run.step(replies=(Tokens(rid="a", token_ids=said),))


def test_what_did_not_arrive_is_computed_again() -> None:
    """Also by a request that shares it, in the same batch."""
    run = PlannedRun()
    a, b = run.add("a", 6), run.add("b", 6)
    missing = load(a, 4, 1, 2, missing=(1,))
    run.step(share("a", 4, 2, 1, 2), share("b", 4, 2, 1, 3), loads=(missing,))
    run.take_result()
    run.step(share("b", 4, 2, 1, 3), share("a", 0, 6, 1, 2))
    assert run.take_result().token_ids == (alone(b)[:1], alone(a)[:1])


def test_a_request_whose_load_failed_may_end_with_an_error() -> None:
    run = PlannedRun()
    a = run.add("a", 6)
    run.step(loads=(load(a, 4, 1, 2, missing=(2,)),))
    run.step(replies=(Tokens(rid="a", finish_reason="error"),))


def test_one_whose_load_arrived_may_not() -> None:
    run = PlannedRun()
    a = run.add("a", 6)
    run.step(loads=(load(a, 4, 1, 2),))
    with pytest.raises(Violation, match="ends with an error, but no batch of it failed"):
        run.step(replies=(Tokens(rid="a", finish_reason="error"),))


def test_a_load_into_blocks_of_another_is_found() -> None:
    """The blocks were given away while the load was under way."""
    run = PlannedRun()
    a = run.add("a", 6)
    run.add("b", 6, seed=1)
    run.launch("b", 0, 6, 1, 2)
    with pytest.raises(Violation, match="b reads the wrong KV"):
        run.step(share("b", 6, 1, 1, 2), loads=(load(a, 4, 1, 3),))


@pytest.mark.parametrize("late", [True, False])
def test_a_late_load_begins_nothing_of_who_has_its_name_now(late: bool) -> None:
    """The request before was aborted; the one of now is refused in the step in which that load arrives."""
    run = PlannedRun()
    arrived = msgspec.structs.replace(load(run.add("a", 6), 4, 1, 2), late=late)
    run.step()
    run.abort("a")
    run.step(replies=(Tokens(rid="a", finish_reason="abort"),))
    run.add("a", 6)
    refused = (Refused(rid="a", reason="too long"),)
    if late:
        run.step(loads=(arrived,), replies=refused)
        return
    with pytest.raises(Violation, match="a is refused"):
        run.step(loads=(arrived,), replies=refused)


def test_windows_and_states_get_what_the_next_position_needs() -> None:
    """After eight positions a window of three begins at 6, in its second block."""
    window, state = Window(block_ids=(0, 5, 7), tokens=3), StateTable(block_ids=(0, 6, 8), tokens=4)
    run = PlannedRun()
    message = run.add("a", prompt=10)
    run.step(loads=(msgspec.structs.replace(load(message, 8, 1, 2), windows=(window,), states=(state,)),))
    run.step(share("a", 8, 2, 1, 2, 3, windows=(window,), states=(state,)))


@pytest.mark.parametrize(
    ("name", "what"),
    [("windows", (Window(block_ids=(0, 5, 7), tokens=3),)), ("states", (StateTable(block_ids=(0, 5, 8), tokens=4),))],
)
def test_of_a_load_that_did_not_arrive_they_get_nothing(name: str, what: Any) -> None:
    run = PlannedRun()
    message = run.add("a", prompt=10)
    lost = load(message, 8, 1, 2, missing=(1, 2))
    run.step(loads=(msgspec.structs.replace(lost, **{name: what}),))
    # Its first blocks are computed again, and the others are not.
    run.step(share("a", 0, 8, 1, 2))
    run.take_result()
    with pytest.raises(Violation, match=r"wrong KV|wrong state"):
        run.step(share("a", 8, 2, 1, 2, 3, **{name: what}))


def test_what_is_carried_outside_of_batches_can_be_read() -> None:
    """Also in the step that carries it; a page has what its source had then."""
    run = PlannedRun()
    a = run.add("a", 4)
    run.launch("a", 0, 4, 1)
    run.step(carried=((1, 101),))
    run.add("b", 4, seed=1)
    run.launch("b", 0, 4, 1)
    run.step(share("a", 4, 1, 2, 3), carried=((101, 2),))
    assert run.take_result().token_ids == (alone(a)[1:2],)


def test_what_is_carried_later_has_what_is_there_then() -> None:
    run = PlannedRun()
    run.add("a", 4)
    run.launch("a", 0, 4, 1)
    run.add("b", 4, seed=1)
    run.launch("b", 0, 4, 1)
    with pytest.raises(Violation, match="a reads the wrong KV"):
        run.step(share("a", 4, 1, 2, 3), carried=((1, 101), (101, 2)))


@pytest.mark.parametrize("between", [101, -1])
def test_a_flush_empties_what_is_not_outside(between: int) -> None:
    run = PlannedRun()
    a = run.add("a", 4)
    run.launch("a", 0, 4, 1)
    run.step(carried=((1, between),))
    run.events.append(FlushCache(call_id="call-1"))
    run.step(replies=(Answer(call_id="call-1", ok=True),))
    if between < 0:
        run.step(share("a", 4, 1, 2, 3), carried=((between, 2),))
        assert run.take_result().token_ids == (alone(a)[1:2],)
    else:
        with pytest.raises(Violation, match="before the cache was flushed"):
            run.step(share("a", 4, 1, 2, 3), carried=((between, 2),))
