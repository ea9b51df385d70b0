"""An open request goes on unless something stands in its way, also where a later event would wake it up again.

Goal: what hangs in the middle of a run is found there, with the name of the request and since when it hangs; what is
paused, held or without room is no finding. Method: schedules in which all ends well after the hang, of this engine and
of the example of a scheduler, each broken so that it loses a wake-up; each with and without the promise.
"""

from __future__ import annotations

import pytest

from scripted.core.adapters import adapter_named
from scripted.core.common_actions import AdvanceClock
from scripted.core.mutant import Mutant
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import MORE_STEPS, PATIENCE_STEPS, STEPS_LIMIT, Run
from scripted.core.schedule import Schedule
from scripted.sdk import Add, Capabilities, Limits
from scripted.sdk.oracle import SdkOracle
from scripted.search.execution import Failure, execute

EXAMPLE = "examples/your_scheduler/fixed.py"
PAIR = "default; 1 start a prompt=5 new=10; 1 start b prompt=5 seed=1 new=10"
# With a launches b stands still until c comes.
ABORTED = f"{PAIR}; 4 abort a; 12 start c prompt=5 seed=2 new=2"


def mutant(target: str, cut: str, becomes: str) -> Mutant:
    return Mutant(
        name="loses-a-wake-up",
        origin="-",
        bug="-",
        signature="waits",
        test=__name__,
        target=target,
        cut=cut,
        becomes=becomes,
    )


def failure_of(text: str, of: str = "lockstep") -> Failure | None:
    # What its specification says of each step would find these bugs of this engine as well.
    return execute(Schedule.parse(text, of=of), leave_out=True).failure


def without_the_promise(monkeypatch: pytest.MonkeyPatch, text: str, of: str = "lockstep") -> Failure | None:
    with monkeypatch.context() as patched:
        patched.setattr(Run, "_check_stands", lambda _: None)
        patched.setattr(Run, "_check_waits", lambda _: None)
        return failure_of(text, of)


def test_what_a_later_event_wakes_up_was_found_where_it_stood(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = mutant(
        "engine.core.scheduler.scheduler:Scheduler.step",
        "self._launch()",
        "None if any(type(one).__name__ == 'Abort' for one in events) else self._launch()",
    )
    assert failure_of(ABORTED) is None
    with broken.switched_on():
        assert without_the_promise(monkeypatch, ABORTED) is None
        found = failure_of(ABORTED)
    assert found is not None
    assert found.text.startswith(
        "nothing happens any more, but something waits forever: b (decode since step 3); nothing is in flight, "
    ), found.text
    assert found.step == 4, "where it stands still, not where the run ends"


@pytest.mark.parametrize("pause", ["pause mode=in_place", "pause mode=retract", "hold", "hold-grammars"])
def test_what_is_kept_back_may_stand(pause: str) -> None:
    assert failure_of(f"{PAIR}; 3 {pause}; 30 start c prompt=5 seed=2 new=2") is None


def test_batches_with_room_do_not_leave_out_who_waits_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter_named(EXAMPLE)
    broken = mutant(
        "scheduler:Scheduler.schedule",
        "while self.waiting and budget",
        "while self.waiting and not self.running and budget",
    )
    late = "1 start a prompt=5 new=20; 4 start b prompt=5 seed=1 new=4"
    assert failure_of(f"default; {late}", EXAMPLE) is None
    with broken.switched_on():
        assert without_the_promise(monkeypatch, f"default; {late}", EXAMPLE) is None
        found = failure_of(f"default; {late}", EXAMPLE)
        # There is no room beside a: it may wait.
        crowded = failure_of(f"blocks=6; {late}", EXAMPLE)
        # Nothing is held: these release nothing, and explain no wait.
        idle = failure_of(f"default; {late}; 6 release; 8 release count=1; 11 release; 14 release", EXAMPLE)
    assert found == idle
    assert found is not None
    assert "b (waiting since step 4); 8 batches with room were launched without it" in found.text
    assert crowded is None


# A request of this engine whose output alone takes longer than a run.
LONG = "default; 1 start a prompt=5 new={}"


def test_prompts_that_are_computed_token_by_token_have_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside drafts a batch of decodes may have many more tokens than one with a prompt."""
    monkeypatch.setattr("scripted.core.promises.liveness._SLACK_STEPS", 1)
    text = "chunked_prefill_size=1 speculative_algorithm=draft_model speculative_draft_model=embedded"
    assert failure_of(f"{text}; 1 start a prompt=100 new=3") is None


def test_prompts_of_another_scheduler_in_small_parts_have_their_steps() -> None:
    """An adapter of the SDK says how much of a prompt a batch has, where that is less than the batch."""
    steps = []
    for prompt_tokens in (None, 1):
        limits = Limits(
            block_size=4, blocks=8, batch_tokens=16, batch_requests=2, context_tokens=32, prompt_tokens=prompt_tokens
        )
        oracle = SdkOracle(limits, Capabilities(), None)
        oracle.account.begin(Add(rid="a", prompt_ids=tuple(range(16)), max_new_tokens=1))
        steps.append(oracle.work_left)
    assert steps == [(1 + 1) * 2, (16 + 1) * 2]


def test_requests_that_need_more_steps_than_the_limit_get_them() -> None:
    outcome = execute(Schedule.parse(LONG.format(STEPS_LIMIT + 500)))
    assert outcome.failure is None
    assert outcome.steps > STEPS_LIMIT


@pytest.mark.parametrize("new", [3 * MORE_STEPS * STEPS_LIMIT, 99_999_999_999])
def test_a_schedule_that_asks_for_too_much_is_to_blame_itself(new: int) -> None:
    with pytest.raises(ScriptDefinitionError) as refused:
        execute(Schedule.parse(LONG.format(new)))
    assert f"at most {MORE_STEPS * STEPS_LIMIT} steps" in str(refused.value)
    assert f"a alone asks for {new} new tokens; ask for fewer" in str(refused.value)


def test_a_fleet_that_asks_for_too_much_is_to_blame_itself() -> None:
    text = 'engines=e; 1 begin on=e do="start g prompt=7 new=99999999999"'
    with pytest.raises(ScriptDefinitionError, match="g alone asks for 99999999999 new tokens"):
        execute(Schedule.parse(text, of="lockstep-fleet"))


def test_many_obstacles_are_removed_while_the_scheduler_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty sessions kept the blocks of a request, of which three ended in time: "not settled after 4000 steps"."""
    still = AdvanceClock(seconds=0)
    monkeypatch.setattr(Run, "obstacle", property(lambda run: still if len(run.implied) < 20 else None))
    removed = execute(Schedule.parse(LONG.format(3_500))).implied
    steps = [one.step for one in removed]
    assert len(set(steps[:20])) == 20
    assert steps[0] > PATIENCE_STEPS
    assert steps[19] < 3 * PATIENCE_STEPS
