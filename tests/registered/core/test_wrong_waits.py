"""Waits and predicates that are none: each script is refused at its line.

Goal: a script that tests nothing never passes without a message. Method: one mistake a script, written from the page
of the contract, run by hand on one engine of each tier. Origin: scripts that were green and should not have been; D02,
D03, D08. Mutant: none, the harness is what is tested.
"""

import pytest
from wrong_scripts import ONE_STAGE, Script, Table, check_refused, was_green

from ci.register import register_cpu_ci

register_cpu_ci(est_time=2, suite="base-cpu")

REFUSED = Table()
refused = REFUSED.add


# -- what has arrived is work --


@refused("assert not")
@was_green
def is_idle_with_a_request_at_the_gate(t):
    r = t.start_req(prompt_len=10)
    assert t.state.waiting == [r.rid]
    assert [arrival.kind for arrival in t.state.arrived] == ["start"]
    assert not t.is_fully_idle
    assert not t.state.is_fully_idle
    assert not t.state.is_quiescent
    assert not t.state.queues_clear
    assert t.engine_stats().waiting == 1
    yield from t.run_until_idle()
    assert not r.finished


@refused("assert not")
@was_green
def waits_for_quiescence(t):
    r = t.start_req(prompt_len=10)
    yield from t.run_until(lambda: t.state.is_quiescent)
    assert not r.finished


@refused("assert not")
@was_green
def waits_for_empty_queues(t):
    r = t.start_req(prompt_len=10, max_new_tokens=1)
    yield from t.run_until(lambda: not t.state.waiting and not t.state.in_flight)
    assert not r.finished


@refused("assert not")
@was_green
def is_idle_with_a_flush_at_the_gate(t):
    flush = t.flush_cache()
    yield from t.run_until_idle()
    assert not flush.done


# -- predicates that are no predicates --


@refused("the method t.clock.now is always true.*t.clock.now(...)")
@was_green
def takes_a_method_for_its_value(t):
    yield from t.run_until(lambda: t.clock.now)


@refused("the method t.is_finished is always true")
@was_green
def asserts_a_method(t):
    t.start_req(rid="a", prompt_len=10)
    yield
    assert t.is_finished


@refused("the method t.clock.now is compared with 5")
@was_green
def compares_a_method(t):
    yield
    assert t.clock.now != 5


@refused("scripted-1.*is always true")
@was_green
def takes_a_handle_for_its_end(t):
    r = t.start_req(prompt_len=10)
    yield from t.run_until(lambda: r)


@refused("a generator, which is always true; ask any")
@was_green
def takes_a_generator_for_any(t):
    r = t.start_req(prompt_len=10)
    yield from t.run_until(lambda: (one.finished for one in [r]))


@refused("<lambda>, which is always true until it is called")
@was_green
def takes_a_function_for_its_value(t):
    r = t.start_req(prompt_len=10)
    yield from t.run_until(lambda: lambda: r.finished)


@refused("<run_until_idle()> is always true")
@was_green
def takes_a_wait_for_a_predicate(t):
    t.start_req(prompt_len=10)
    yield from t.run_until(lambda: t.run_until_idle())


@refused("State is always true")
@was_green
def takes_the_state_for_a_predicate(t):
    t.start_req(prompt_len=10)
    yield from t.run_until(lambda: t.state)


@refused("Call(/flush_cache, .* is always true")
@was_green
def asserts_a_call(t):
    flush = t.flush_cache()
    yield
    assert flush


@refused("<lambda>, which is always true until it is called")
@was_green
def gives_a_window_a_function(t):
    r = t.start_req(prompt_len=10)
    yield from t.run_until_finished(r)
    t.sometimes("the window", lambda: r.retractions)


# -- waits for nothing --


@refused("at least one handle, got none")
@was_green
def waits_for_no_request(t):
    rs = [t.start_req(prompt_len=10)]
    yield from t.run_until_all_finished([r for r in rs if r.status == "running"])


@refused("takes a handle, the value of t.start_req")
def waits_for_a_rid(t):
    t.start_req(rid="x", prompt_len=10)
    yield from t.run_until_finished("x")


@refused("was run before and does nothing the second time")
@was_green
def runs_a_wait_twice(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    wait = t.run_until_finished(r)
    yield from wait
    t.start_req(prompt_len=10)
    yield from wait


@refused("max_steps >= 1, a whole number, got 0")
@was_green
def waits_for_no_step(t):
    yield from t.run_until(lambda: True, max_steps=0)


@refused("call it: yield from t.run_until_idle(...)")
def forgets_the_parentheses(t):
    yield from t.run_until_idle


# -- how each is refused --


@pytest.mark.parametrize(("script", "words"), REFUSED.cases)
def test_a_wait_that_is_none_is_refused_at_its_line(harness, script: Script, words: str) -> None:
    """D02, D03: with the remedy, and without the harness's own lines."""
    with harness(ONE_STAGE) as engine:
        check_refused(engine, script, words)


def test_most_of_these_waits_were_green() -> None:
    assert REFUSED.were_green() >= 17
