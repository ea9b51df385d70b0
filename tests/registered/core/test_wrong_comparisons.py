"""Comparisons that can only come out one way, and questions about nothing: each script is refused at its line.

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


# -- answers that are not there, and comparisons that can only come out one way --


@refused("has no answer yet, so it has no .status")
@was_green
def compares_an_answer_that_is_not_there(t):
    r = t.start_req(prompt_len=10)
    yield
    t.hold_results()
    f = t.flush_cache(timeout_s=5)
    yield
    assert f.status != 400
    t.release_results()
    yield from t.run_until_finished(r)


@refused("has no answer yet, so it has no .text")
@was_green
def looks_for_a_word_in_no_answer(t):
    f = t.flush_cache()
    assert "in_flight" not in f.text
    yield


@refused("is compared with 400, which it can never be equal to")
@was_green
def compares_a_call_with_its_status(t):
    f = t.flush_cache()
    yield
    assert f != 400


@refused("is looked for among rids or numbers, where it can never be; look for its .rid")
@was_green
def looks_for_a_handle_among_rids(t):
    r = t.start_req(prompt_len=10)
    t.start_req(prompt_len=10)
    yield
    assert r not in t.state.waiting


@refused("is compared with 'a', which it can never be equal to")
@was_green
def compares_rids_with_a_rid(t):
    t.start_req(rid="a", prompt_len=10)
    yield from t.run_until(lambda: "a" in t.state.running)
    assert t.state.running != "a"


@refused(
    "status is one of aborted, finished, running, unknown, waiting; it can never be 'abort' (did you mean 'aborted'?)"
)
@was_green
def misspells_a_status(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.status != "abort"


@refused("finish_reason is one of abort, error, invalid, length, stop, timeout, unavailable; it can never be 'aborted'")
@was_green
def misspells_a_finish_reason(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.finish_reason != "aborted"


@refused("a microbatch's mode is one of")
@was_green
def misspells_a_mode(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    yield
    assert t.last_batch_forward_mode != "prefil"
    yield from t.run_until_finished(r)


@refused("a pause's mode is one of")
@was_green
def takes_a_mode_for_a_bool(t):
    t.pause_generation()
    yield
    assert t.state.paused != True  # noqa: E712 - the mistake


@refused("assert")
@was_green
def expects_a_list_to_differ(t):
    r = t.start_req(prompt_len=10, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.output_ids != list(r.output_ids)


# -- questions about nothing --


@refused("asks about a rid that never was (did you mean 'alpha'?)")
@was_green
def asks_for_a_misspelt_rid(t):
    r = t.start_req(rid="alpha", prompt_len=10)
    yield
    assert not t.is_finished("alpah")
    yield from t.run_until_finished(r)


@refused("t.remaining_prompt_tokens('missing') asks about a rid that never was")
@was_green
def counts_the_tokens_of_nothing(t):
    yield
    assert t.remaining_prompt_tokens("missing") == 0


@refused("t.is_chunking() takes a rid, got <scripted-1")
@was_green
def asks_by_handle(t):
    r = t.start_req(prompt_len=200)
    yield
    yield
    assert not t.is_chunking(r)


@refused("'windows', which is not in must_reach (did you mean 'window'?)")
@was_green
def misspells_its_window(t):
    r = t.start_req(prompt_len=10)
    yield from t.run_until_finished(r)
    t.sometimes("window", condition=True)
    t.sometimes("windows", not r.finished)


# -- how each is refused --


@pytest.mark.parametrize(("script", "words"), REFUSED.cases)
def test_a_comparison_of_nothing_is_refused_at_its_line(harness, script: Script, words: str) -> None:
    """D02, D03: with the remedy, and without the harness's own lines."""
    with harness(ONE_STAGE) as engine:
        check_refused(engine, script, words, must_reach=("window",) if script is misspells_its_window else ())


def test_these_comparisons_were_green() -> None:
    assert REFUSED.were_green() >= 14
