"""Second turns in schedules: their text, their prompts, recordings, shrinking, written tests and generated targets."""

from __future__ import annotations

import random

import pytest

from scripted import api
from scripted.core.action import rid_of
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import switched_on
from scripted.core.prompts import prompt_ids
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.sdk.as_schedule import schedule_of
from scripted.search.conversations import StartsTurns, drawn_retry
from scripted.search.execution import execute, record
from scripted.search.generated import generated_schedule
from scripted.search.written_test import write_test

EXAMPLE = "examples/your_scheduler/fixed.py"
ASYNCIO = "examples/engines/asyncio_loop.py"
OUTSIDE = "examples/lockstep/outside.py"
BUG = "last-output-has-no-kv"
TURNS = "1 start a prompt=6 new=4; 12 start b after=a cut=2 prompt=3 new=2; 20 start c after=b prompt=1"


def prompts_of(text: str, of: str) -> dict[str, tuple[int, ...]]:
    run = Run(Schedule.parse(text, of=of))
    run.adapter.drive(run)
    return {life.message.rid: (life.message.prompt_ids, tuple(life.said)) for life in run.oracle.account.lives}


@pytest.mark.parametrize("of", [DEFAULT_ADAPTER, EXAMPLE])
def test_a_turn_continues_what_was_asked_and_said(of: str) -> None:
    said = prompts_of(f"default; {TURNS}; 20 start d after=nobody prompt=4; 21 start e after=a cut=0 prompt=0", of)
    first, output = said["a"]
    assert said["b"][0] == (*first, *output[:2], *prompt_ids(3, 0))
    assert said["c"][0] == (*said["b"][0], *said["b"][1], *prompt_ids(1, 0))
    assert said["d"][0] == prompt_ids(4, 0), "nobody has said anything"
    assert said["e"][0] == first


@pytest.mark.parametrize("of", [DEFAULT_ADAPTER, EXAMPLE])
def test_a_turn_begins_while_the_request_runs_and_after_its_abort(of: str) -> None:
    said = prompts_of(
        "default; 1 start a prompt=4 new=9; 1 start b after=a prompt=2; 5 start c after=a prompt=1; 7 abort a;"
        "7 start d after=a prompt=1",
        of,
    )
    first, output = said["a"]
    assert said["b"][0] == (*first, *prompt_ids(2, 0)), "it has arrived, and has said nothing"
    # A result may come in the step of the abort.
    continued = len(said["d"][0]) - 1 - len(first)
    assert len(first) < len(said["c"][0]) - 1 < len(first) + continued
    assert len(output) - 1 <= continued <= len(output)


def test_its_text_is_read_back_and_a_negative_cut_is_refused() -> None:
    schedule = Schedule.parse(f"default; {TURNS}")
    assert "start b prompt=3 after=a cut=2" in str(schedule)
    assert Schedule.parse(str(schedule)) == schedule
    with pytest.raises(ScriptDefinitionError, match="Expected `int` >= 0"):
        Schedule.parse("default; 1 start a after=b cut=-1 prompt=2")


@pytest.mark.parametrize("of", [EXAMPLE, OUTSIDE])
def test_a_recording_says_who_continues_whom(of: str) -> None:
    schedule = Schedule.parse(
        f"default; {TURNS}; 22 start e after=b prompt=3 shared=1 tail=7; 30 start f prompt=6", of=of
    )
    _, records = record(schedule)
    translated = schedule_of(schedule.adapter, schedule.config, records)
    turns = {one.action.rid: one.action for one in translated.schedule.placed if isinstance(one.action, StartsTurns)}
    assert [(turn.after, turn.cut) for turn in turns.values()] == [
        ("", None), ("r1", 2), ("r2", 2), ("r2", 2), ("", None)
    ]  # fmt: skip
    assert turns["r5"].seed == turns["r1"].seed, "the same prompt again"
    _, again = record(translated.schedule)
    lengths = [len(event.prompt_ids) for one in records for event in one.step.events if hasattr(event, "prompt_ids")]
    assert lengths == [
        len(event.prompt_ids) for one in again for event in one.step.events if hasattr(event, "prompt_ids")
    ]


def test_a_bug_of_second_turns_is_shrunk_to_two_turns_and_written() -> None:
    """Without the checks of the cache and of the specification: by the read of what was never computed alone."""
    schedule = Schedule.parse(
        "page_size=4; 1 start one prompt=9 new=3; 2 start two prompt=5 seed=4; 18 start three after=one prompt=7 new=3"
    )
    with adapter_named(DEFAULT_ADAPTER).switched_on(BUG):
        assert execute(schedule).failure is not None
    assert execute(schedule).failure is None
    written = write_test([schedule], name="turns", mutant=BUG)
    assert written.text is not None, written.said
    assert "after=one" in written.text
    shrunk = api.shrink(schedule, mutant=BUG).schedule
    assert len(shrunk.placed) <= 2


def test_renaming_renames_the_request_that_is_continued() -> None:
    action = Schedule.parse(f"default; {TURNS}").placed[1].action
    renamed = action.renamed({"a": "x", "b": "y"})
    assert isinstance(renamed, StartsTurns)
    assert (renamed.rid, renamed.after) == ("y", "x")


@pytest.mark.parametrize("of", [DEFAULT_ADAPTER, EXAMPLE])
def test_generated_targets_have_every_kind_of_turn_and_a_healthy_engine_serves_them(of: str) -> None:
    found = set()
    for number in range(2, 182, 3):
        schedule = generated_schedule(number, of)
        turns = [one.action for one in schedule.placed if isinstance(one.action, StartsTurns) and one.action.after]
        found |= {turn.rid.rpartition("-")[2][0] for turn in turns}
        found |= {"cut" for turn in turns if turn.cut is not None}
        found |= {"chain" for turn in turns if "-" in turn.after}
        if number < 60:
            assert execute(schedule).failure is None, str(schedule)
    assert found >= {"t", "b", "w", "c", "cut", "chain"}


def test_a_late_result_meets_the_next_request_with_its_id(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client gives up a request in flight and sends another under the same id before the result comes."""
    adapter = adapter_named(ASYNCIO)

    def failing() -> int:
        generated_schedule.cache_clear()
        with switched_on(adapter, "a-late-result-goes-by-its-id"):
            return sum(execute(generated_schedule(number, ASYNCIO)).failure is not None for number in range(60))

    found = failing()
    monkeypatch.setattr("scripted.search.generated.drawn_retry", lambda *_: iter(()))
    left = failing()
    generated_schedule.cache_clear()
    assert (found > 2, left) == (True, 0)


def test_a_retry_is_held_aborted_and_sent_again_in_this_order() -> None:
    schedule = Schedule.parse("default; 4 start a prompt=6 new=4")
    for seed in range(20):
        hold, abort, again, release = drawn_retry(random.Random(seed), schedule)
        assert [one.action.kind for one in (hold, abort, again, release)] == ["hold", "abort", "start", "release"]
        assert 4 <= hold.step <= abort.step <= again.step < release.step
        assert rid_of(abort.action) == rid_of(again.action) == "a"
    assert list(drawn_retry(random.Random(1), Schedule.parse("default; 4 flush"))) == []
