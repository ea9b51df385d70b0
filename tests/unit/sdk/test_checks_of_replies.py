"""The checks of what every scheduler tells its clients: tokens, ends and answers, in pauses, sleeps and at the end."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace
from planned_run import ABORT, KEEP, STOP, PlannedRun, alone, answered, planned_run, refused, share, told

from scripted.sdk import FlushCache, Pause, Refused, Resume, Sleep, Wake


@pytest.fixture
def run() -> PlannedRun:
    return planned_run()


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


@pytest.mark.parametrize(
    ("calls", "to_wake"),
    [
        ((), []),
        ((Sleep(call_id="s"),), [""]),
        ((Sleep(call_id="s", part="weights"),), ["weights"]),
        ((Sleep(call_id="s", part="weights"), Sleep(call_id="t", part="kv_cache")), [""]),
        ((Sleep(call_id="s"), Wake(call_id="w", part="kv_cache")), ["weights"]),
        ((Sleep(call_id="s"), Wake(call_id="w")), []),
        ((Sleep(call_id="s", part="weights"), Wake(call_id="w"), Sleep(call_id="t", part="kv_cache")), ["kv_cache"]),
    ],
)
def test_a_run_wakes_what_sleeps(calls: Sequence[Sleep | Wake], to_wake: list[str]) -> None:
    """SGLang ends if memory is taken back that was never released, and so did each run that released a part."""
    run = asleep(wake_parts=("kv_cache", "weights"))
    for call in calls:
        run.events.append(call)
        run.step(replies=(replace(answered(call.call_id), ok=call.part != "kv_cache" or isinstance(call, Sleep)),))
    assert list(run.oracle.to_wake) == to_wake


def test_a_sleep_over_a_batch_in_flight() -> None:
    run = asleep()
    run.step(share("a", 4, 1, 0, 1))
    run.events.append(Sleep(call_id="s"))
    with refused("s releases the device's memory, but batch 2 is in flight there"):
        run.step(replies=(answered("s"),))


def test_a_sleep_of_level_0_is_a_pause_alone() -> None:
    """Over a batch in flight, and without a wake."""
    run = asleep()
    run.step(share("a", 4, 1, 0, 1))
    run.events.append(Sleep(call_id="s", level=0))
    run.step(replies=(answered("s"),))
    run.launch("a", 5, 1, 0, 1)


@pytest.mark.parametrize(("level", "part"), [(0, ""), (1, "weights")])
def test_kv_outlives_a_sleep_that_leaves_its_memory_alone(level: int, part: str) -> None:
    run = asleep()
    run.events.append(Sleep(call_id="s", level=level, part=part))
    run.step(replies=(answered("s"),))
    run.events.append(Wake(call_id="w"))
    run.step(replies=(answered("w"),))
    run.launch("a", 4, 1, 0, 1)


@pytest.mark.parametrize(("level", "part"), [(1, "kv_cache"), (2, "")])
def test_kv_is_lost_with_its_memory_alone(level: int, part: str) -> None:
    run = asleep()
    run.events.append(Sleep(call_id="s", level=level, part=part))
    run.step(replies=(answered("s"),))
    run.events.append(Wake(call_id="w"))
    run.step(replies=(answered("w"),))
    with refused("a reads block 0, which was written before the cache was flushed"):
        run.step(share("a", 4, 1, 0, 1))


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


def test_a_request_that_waits_forever(run: PlannedRun) -> None:
    run.add("a")
    run.step()
    with refused(r"nothing happens any more, but something waits forever: a \(waiting\)"):
        run.oracle.at_rest(run.machine)


def test_a_call_that_is_never_answered(run: PlannedRun) -> None:
    run.events.append(FlushCache(call_id="flush"))
    run.step()
    with refused(
        r"nothing happens any more, but something waits forever: flush \(FlushCache, never answered\); "
        r"Capabilities\(flush=False\) says that no flush is known"
    ):
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
