"""Loose ends, which may be meant and are counted in the summary: requests, answers and faults left behind.

Goal: a script that tests nothing never passes without a message. Method: one mistake a script, written from the page
of the contract, run by hand on one engine of each tier. Origin: scripts that were green and should not have been; D02,
D03, D08. Mutant: none, the harness is what is tested.
"""

import contextlib
from collections.abc import Callable

import pytest
from wrong_scripts import ONE_STAGE, Script, Table, was_green

from ci.register import register_cpu_ci
from scripted import ScriptedSim, ScriptFailed, ScriptOptions

register_cpu_ci(est_time=2, suite="base-cpu")

COUNTED = Table()


def counted(what: str, count: int = 1) -> Callable[[Script], Script]:
    """A script that passes with this count in the summary."""
    return COUNTED.add(what, count)


# -- loose ends that may be intended, and are counted --


@counted("requests alive at the end", 2)
@was_green
def ends_while_its_requests_run(t):
    for _ in range(2):
        t.start_req(prompt_len=10, max_new_tokens=30)
    yield


@counted("requests alive at the end")
@was_green
def starts_one_that_no_step_sees(t):
    yield
    t.start_req(prompt_len=10)


@counted("answers never looked at")
@was_green
def flushes_and_never_looks(t):
    t.flush_cache()
    yield


@counted("calls without an answer at the end")
@was_green
def ends_before_the_answer(t):
    r = t.start_req(prompt_len=10, max_new_tokens=3)
    yield
    t.flush_cache(timeout_s=5)
    yield
    assert not r.finished


@counted("scripts without a step")
@was_green
def runs_no_step(t):
    return
    yield


@counted("scripts in which no step had anything to do")
@was_green
def runs_steps_of_nothing(t):
    for _ in range(3):
        yield


@counted("windows not in must_reach")
@was_green
def names_a_window_that_need_not_open(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    yield from t.run_until_finished(r)
    t.sometimes("a retraction", r.retractions)


@counted("aborts of rids that never were")
@was_green
def aborts_a_misspelt_rid(t):
    r = t.start_req(rid="alpha", prompt_len=10, max_new_tokens=2)
    t.abort("alhpa")
    yield from t.run_until_finished(r)


@counted("questions about rids that never were", 2)
@was_green
def looks_for_a_misspelt_rid(t):
    r = t.start_req(rid="alpha", prompt_len=10, max_new_tokens=2)
    yield
    assert t.find_req_by_rid("alhpa") is None
    assert t.status("alhpa") == "unknown"
    yield from t.run_until_finished(r)


@counted("answers never looked at")
@was_green
def is_refused_and_never_looks(t):
    t.load_lora("x", "embedded-lora:1")
    yield


@counted("failures of a grammar that none met")
@was_green
def orders_a_failure_that_no_grammar_meets(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    t.fail_next_grammar()
    yield from t.run_until_finished(r)


@counted("failures of a stage that no step met")
@was_green
def orders_a_failure_that_no_step_meets(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    yield from t.run_until_finished(r)
    t.fail_next_step(0)
    yield


@counted("bad calls that the script caught", 2)
@was_green
def swallows_what_it_is_told(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    for leave in (10**9, -1):
        with contextlib.suppress(ValueError):
            t.exhaust_kv(leave)
    yield from t.run_until_finished(r)


# -- how each is counted --


@pytest.mark.parametrize(("script", "what", "count"), COUNTED.cases)
def test_what_may_be_meant_is_counted(harness, script: Script, what: str, count: int) -> None:
    with harness(ONE_STAGE) as engine:
        assert engine.run(script).loose_ends.get(what) == count


def test_all_of_these_were_green() -> None:
    assert COUNTED.were_green() == len(COUNTED.cases) > 0


def test_a_script_without_a_step_is_no_test() -> None:
    """D08: by hand it may be run; as a test it is refused."""
    with ScriptedSim.start(ONE_STAGE) as sim, pytest.raises(ScriptFailed, match="ended without a step"):
        sim.run(runs_no_step, options=ScriptOptions(must_step=True))


def test_a_right_script_leaves_no_loose_end(harness) -> None:
    with harness(ONE_STAGE) as engine:
        assert engine.run(does_everything_right).loose_ends == {}


def takes_arguments(t, sizes, *, nested):
    assert type(sizes) is tuple
    assert nested == {"pairs": [(1, 2), (3,)]}
    r = t.start_req(prompt_len=sizes[0], max_new_tokens=sizes[1])
    yield from t.run_until_finished(r)


def test_a_tuple_arrives_as_a_tuple(harness) -> None:
    with harness(ONE_STAGE) as engine:
        assert engine.run(takes_arguments, (10, 2), nested={"pairs": [(1, 2), (3,)]}).compared == 1


def fails_a_stage(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    t.fail_next_step(0)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "error"


def test_a_failure_that_a_step_met_is_no_loose_end(harness) -> None:
    with harness(ONE_STAGE) as engine:
        assert engine.run(fails_a_stage).loose_ends == {}


def does_everything_right(t):
    r = t.start_req(prompt_len=100, max_new_tokens=3)
    yield from t.run_until(lambda: t.state.in_flight)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert r.req is not None, "the live object is kept for the very step of the end"
    assert r.output_ids == list(r.output_ids) == list(r.client.token_ids)
    assert flush.status == 400
    assert t.last_batch_forward_mode == "decode"
    yield
    assert r.req is None
    assert t.last_batch_forward_mode is None
    assert not any(t.batch_composition().values())
