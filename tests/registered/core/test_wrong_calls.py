"""Misspelt calls, ends from inside, and waits that spend their budget: each script is refused at its line.

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


# -- mistakes that Python accepts and the harness refuses --


@refused("t has no 'start_request' (did you mean 'start_req'?)")
def misspells_a_verb(t):
    t.start_request(prompt_len=10)
    yield


@refused("did you mean 'prompt_len'.*it takes prompt_len, prompt_ids")
def misspells_an_argument(t):
    t.start_req(prompt_length=10)
    yield


@refused("did you mean 'chunks_done'")
def misspells_an_attribute(t):
    r = t.start_req(prompt_len=10)
    yield
    assert r.chunk_done == 0


@refused("has no attribute 'output_ids' (did you mean 'r.output_ids'?)")
def asks_the_scheduler_s_object_for_tokens(t):
    r = t.start_req(prompt_len=10)
    yield
    assert r.req.output_ids == []


@refused("has no attribute 'finish_reason' (did you mean 'r.finish_reason'?)")
def asks_the_scheduler_s_object_after_its_end(t):
    r = t.start_req(prompt_len=10, max_new_tokens=1)
    yield from t.run_until_finished(r)
    yield
    assert r.req.finish_reason == "length"


@refused("write 'yield' alone")
def yields_three(t):
    yield 3


@refused("write 'yield from helper(...)'")
def yields_a_helper(t):
    yield helper(t)


def helper(t):
    yield


@refused("takes seconds >= 0, got nan")
@was_green
def advances_by_nothing_known(t):
    t.clock.advance(float("nan"))
    yield


@refused("the script was left by SystemExit")
def leaves_by_exit(t):
    yield
    raise SystemExit(0)


@refused("E       Skipped: not today")
def skips_itself(t):
    yield
    pytest.skip("not today")


@refused("E       XFailed: a known defect")
def is_an_expected_failure(t):
    yield
    pytest.xfail("a known defect")


@refused("E       Failed: it ended otherwise")
def fails_by_a_call(t):
    yield
    pytest.fail("it ended otherwise")


@refused("E       Failed: DID NOT RAISE KeyError")
def expects_what_is_not_raised(t):
    yield
    with pytest.raises(KeyError):
        t.start_req(prompt_len=10)


# -- a spent budget --


@refused("results are held, 1 microbatches in flight wait for t.release_results()")
def waits_for_results_that_are_held(t):
    t.hold_results()
    r = t.start_req(prompt_len=10)
    yield from t.run_until_finished(r, max_steps=5)


@refused("1 rows are kept back|rows are kept back by t.exhaust_rows(), until t.release_exhausted()")
def waits_for_rows_that_are_kept_back(t):
    t.exhaust_rows(0)
    r = t.start_req(prompt_len=10)
    yield from t.run_until_finished(r, max_steps=5)


@refused("generation is paused (in_place), until t.continue_generation()")
def waits_while_paused(t):
    t.pause_generation("in_place")
    r = t.start_req(prompt_len=10)
    yield from t.run_until_finished(r, max_steps=5)


@refused("stage 0 is stalled, nothing completes until t.resume_stage(0)")
def waits_for_a_stalled_stage(t):
    t.stall_stage(0)
    r = t.start_req(prompt_len=10)
    yield from t.run_until_finished(r, max_steps=5)


@refused("only t.clock.advance(seconds) moves that")
def waits_for_time_to_pass(t):
    t.hold_results()
    t.start_req(prompt_len=10)
    yield
    f = t.flush_cache(timeout_s=5)
    yield from t.run_until(lambda: f.done, max_steps=5)


@refused("the predicate never held: the engine is fully idle, so no further step can change anything; step 1:")
def waits_for_nothing_at_all(t):
    yield from t.run_until(lambda: False)


@refused("the predicate never held: the engine is fully idle, so no further step can change anything; step ")
def waits_for_what_has_ended(t):
    r = t.start_req(prompt_len=10, max_new_tokens=1)
    yield from t.run_until_finished(r)
    yield from t.run_until(lambda: r.rid in t.state.running or len(r.output_ids) > 1)


@refused("the predicate never held within 5 steps; step 5: .*the engine is fully idle, so no further step")
def waits_for_a_step_that_is_far_away(t):
    yield from t.run_until(lambda: t.state.step == 9, max_steps=5)


@refused("nothing is known to stand in its way; max_steps=N allows more")
def waits_too_short(t):
    r = t.start_req(prompt_len=10, max_new_tokens=50)
    yield from t.run_until_finished(r, max_steps=5)


# -- links that are not there --


@refused("slow_link() needs stages that joined over TCP.*placement='join'")
def slows_a_link_of_no_network(t):
    t.slow_link(0)
    yield


@refused("slow_link() takes delay_s in real seconds, 0 < delay_s <= 2.0, got 9")
def slows_a_link_without_bound(t):
    t.slow_link(0, delay_s=9)
    yield


@refused("cut_link() needs stages that joined over TCP.*placement='join'")
def cuts_a_link_of_no_network(t):
    t.cut_link(0)
    yield


@refused("heal_link() needs stages that joined over TCP.*placement='join'")
def heals_a_link_of_no_network(t):
    t.heal_link(0)
    yield


@refused("lose_node() needs stages that joined over TCP.*placement='join'")
def loses_a_node_of_no_network(t):
    t.lose_node(0)
    yield


@refused("await_loss() takes a stage whose link is cut, that of stage 0 is not; use cut_link(0)")
def awaits_a_loss_of_nothing(t):
    t.await_loss(0)
    yield


# -- how each is refused --


@pytest.mark.parametrize(("script", "words"), REFUSED.cases)
def test_a_wrong_call_is_refused_at_its_line(harness, script: Script, words: str) -> None:
    """D02, D03: with the remedy, and without the harness's own lines."""
    with harness(ONE_STAGE) as engine:
        check_refused(engine, script, words)
