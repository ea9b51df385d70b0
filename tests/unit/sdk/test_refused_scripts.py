"""Wrong scripts for a scheduler that this project did not write: each is refused at its line, with the reason."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from any_scheduler import FIXED, OUTSIDE, ended

from scripted import ScriptFailed

REFUSED: list[Any] = []


def refused(words: str, adapter: str = FIXED) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def note(script: Callable[..., Any]) -> Callable[..., Any]:
        REFUSED.append(pytest.param(script, words, adapter, id=script.__name__))
        return script

    return note


@refused("ended without a step")
def runs_no_step(t):
    t.start_req(prompt_len=4, max_new_tokens=2)
    return
    yield


@refused("the predicate's answer is the function .*, which is always true until it is called")
def predicate_that_is_a_function(t):
    yield from t.run_until(lambda: runs_no_step)


@refused("t.is_finished is always true")
def predicate_that_is_a_method(t):
    yield from t.run_until(lambda: t.is_finished)


@refused("takes a function to call after each step, got 3")
def predicate_that_is_a_number(t):
    yield from t.run_until(3)


@refused("is always true, so asking it tests nothing")
def predicate_that_is_a_handle(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield from t.run_until(lambda: r)


@refused("State is always true")
def asks_the_state(t):
    yield
    assert t.state


@refused(r"t has no 'start_request' \(did you mean 'start_req'\?\)")
def misspelt_verb(t):
    yield
    t.start_request(prompt_len=4)


@refused(r"t.state has no 'runing' \(did you mean 'running'\?\); it has step, now, .*waiting, running, .*blocks_free")
def misspelt_count(t):
    yield
    assert t.state.runing == 0


@refused(r"takes no 'prompt_length' \(did you mean 'prompt_len'\?\)")
def misspelt_argument(t):
    yield
    t.start_req(prompt_length=4, max_new_tokens=2)


@refused("finish_reason is one of .*; it can never be 'lenght'.*did you mean 'length'")
def reason_that_there_is_not(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "lenght"


@refused("status is one of .*; it can never be 'runing'.*did you mean 'running'")
def status_that_there_is_not(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield
    assert r.status == "runing"


@refused("is compared with 'r1', which it can never be equal to")
def handle_compared_with_a_rid(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield
    assert r == "r1"


@refused("is looked for among rids or numbers, where it can never be; look for its .rid")
def handle_among_rids(t):
    r = t.start_req(prompt_len=4, max_new_tokens=2)
    yield
    assert r in t.last_batch.rids


@refused("is compared with 'r1', which it can never be equal to")
def rids_compared_with_a_text(t):
    t.start_req(prompt_len=4, max_new_tokens=2)
    yield
    assert t.last_batch.rids == "r1"


@refused(r"t.is_finished\('first'\) asks about a rid that never was .did you mean 'first-1'.*has started first-1")
def unknown_rid(t):
    t.start_req(rid="first-1", prompt_len=4, max_new_tokens=2)
    yield
    assert not t.is_finished("first")


@refused("t.run_until_idle.. did nothing: write 'yield from t.run_until_idle..'")
def wait_that_is_not_yielded_from(t):
    t.start_req(prompt_len=4, max_new_tokens=2)
    t.run_until_idle()
    yield


@refused("a script yields nothing, got t.run_until_idle..; write 'yield from")
def wait_that_is_yielded(t):
    t.start_req(prompt_len=4, max_new_tokens=2)
    yield t.run_until_idle()


@refused("takes a handle, the value of t.start_req.*, got 'r1'")
def waits_for_a_rid(t):
    t.start_req(prompt_len=4, max_new_tokens=2)
    yield from t.run_until_finished("r1")


@refused("takes several handles, got")
def waits_for_all_of_one(t):
    yield from t.run_until_all_finished(t.start_req(prompt_len=4, max_new_tokens=2))


@refused("takes at least one handle, got none")
def waits_for_all_of_none(t):
    yield from t.run_until_all_finished([])


@refused("max_steps >= 1, a whole number, got 0")
def waits_for_no_step(t):
    yield from t.run_until_idle(max_steps=0)


@refused("flush_cache has no answer yet, so it has no .status")
def answer_before_it_is_there(t):
    call = t.flush_cache()
    assert call.status == 200
    yield


@refused("is always true, so asking it tests nothing; ask its .done or .status")
def asks_a_call(t):
    call = t.flush_cache()
    yield
    assert call


@refused("t.fail_next_step.. is no verb of .*fixed.py.* declares flush_cache, hold_results, .*start_req")
def undeclared_failure(t):
    yield
    t.fail_next_step(0)


@refused("t.pause_generation.. is no verb of .*fixed.py")
def undeclared_pause(t):
    yield
    t.pause_generation("keep")


@refused("t.continue_generation.. is no verb of")
def undeclared_continue(t):
    yield
    t.continue_generation()


@refused("takes no priority, because .*fixed.py declares none")
def undeclared_priority(t):
    yield
    t.start_req(prompt_len=4, priority=1, max_new_tokens=2)


@refused("takes no force=True, because .*fixed.py declares none")
def undeclared_force(t):
    yield
    t.flush_cache(force=True)


@refused("pause_generation.. takes one of retract, in_place, abort, got 'keep'", OUTSIDE)
def undeclared_mode(t):
    yield
    t.pause_generation("keep")


@refused("takes the rid of no request that is alive, and <a: running")
def rid_that_is_alive(t):
    t.start_req(rid="a", prompt_len=4, max_new_tokens=2)
    yield
    t.start_req(rid="a", prompt_len=4, max_new_tokens=2)


@refused("takes the rid of no request that is alive, and <a: waiting")
def rid_that_has_arrived(t):
    t.start_req(rid="a", prompt_len=4, max_new_tokens=2)
    t.start_req(rid="a", prompt_len=4, max_new_tokens=2)
    yield


@refused("exactly one of prompt_len, prompt_ids and text, got none of them")
def request_without_a_prompt(t):
    yield
    t.start_req(max_new_tokens=2)


@refused("exactly one of prompt_len, prompt_ids and text, got prompt_len, prompt_ids")
def request_with_two_prompts(t):
    yield
    t.start_req(prompt_len=4, prompt_ids=[1], max_new_tokens=2)


@refused("prompt_len >= 1, a whole number, got 0")
def request_of_no_tokens(t):
    yield
    t.start_req(prompt_len=0, max_new_tokens=2)


@refused("max_new_tokens >= 1, a whole number, got 0")
def request_for_no_tokens(t):
    yield
    t.start_req(prompt_len=1, max_new_tokens=0)


@refused("takes prompt_ids that are whole numbers >= 0, got 'abc'")
def request_of_a_text(t):
    yield
    t.start_req(prompt_ids="abc", max_new_tokens=2)


@refused("takes tail_seed=3 with shared_len only")
def tail_without_a_head(t):
    yield
    t.start_req(prompt_len=4, tail_seed=3, max_new_tokens=2)


@refused("takes shared_len from 0 to prompt_len=4, got 5")
def more_shared_than_there_is(t):
    yield
    t.start_req(prompt_len=4, shared_len=5, max_new_tokens=2)


@refused("takes seconds >= 0, got -1")
def time_that_goes_back(t):
    yield
    t.clock.advance(-1)


@refused("n >= 1, or None for all, got 0")
def releases_nothing(t):
    yield
    t.release_results(0)


@refused("the script was left by SystemExit")
def leaves_by_exit(t):
    yield
    sys.exit("enough")


@pytest.mark.parametrize(("wrong", "words", "adapter"), REFUSED)
def test_a_wrong_script_is_refused_at_its_line(wrong: Callable[..., Any], words: str, adapter: str) -> None:
    """D02, D08: with the reason, in the script's own file."""
    with pytest.raises(ScriptFailed, match=words) as caught:
        ended(wrong, adapter)
    frames = caught.value.report.frames  # type: ignore[attr-defined]
    assert {frame.function for frame in frames} & {wrong.__name__, "<lambda>"}
