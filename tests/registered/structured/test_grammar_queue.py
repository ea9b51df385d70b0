"""A request whose grammar is being compiled waits, and nothing else waits for it.

Goal: readiness is an event like any other, in every order with aborts, pauses, flushes and updates. Method: hold
grammars back, let others overtake, end the wait in each way. Origin: SGLang pull request 6803, vLLM pull request 45012,
vLLM issues 14151 and 53130; A05, B12. Mutants: abort-overlooks-the-grammar-queue, failed-grammar-is-waited-for,
grammar-queue-blocks-the-others, abort-cancels-a-shared-grammar, flush-forgets-a-grammar-in-use.
"""

import re

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=8, suite="base-cpu")

CONFIG = EngineConfig(chunked_prefill_size=32, max_total_tokens=512)
STAGED = EngineConfig(pp_size=2, chunked_prefill_size=32, max_total_tokens=512)
REGEX = "[a-c]{5}"


@scripted(CONFIG, must_reach=["the grammar is not ready"])
def test_others_do_not_wait(t):
    t.hold_grammars()
    a = t.start_req(prompt_len=40, regex=REGEX, max_new_tokens=16)
    b = t.start_req(prompt_len=40, prompt_seed=1, max_new_tokens=3)
    yield from t.run_until_finished(b)
    t.sometimes("the grammar is not ready", t.state.waiting_for_grammar == [a.rid])
    assert a.output_ids == ()
    t.release_grammars()
    yield from t.run_until_finished(a)
    assert a.finish_reason == "stop"
    assert re.fullmatch(REGEX, a.client.text)


@scripted(STAGED, must_reach=["it waits"])
def test_abort_while_it_waits(t):
    t.hold_grammars()
    a = t.start_req(prompt_len=20, regex=REGEX)
    yield
    t.sometimes("it waits", t.state.waiting_for_grammar == [a.rid])
    t.abort(a)
    yield
    assert a.finish_reason == "abort", f"{a.rid} was aborted, but is {a.status}"
    t.release_grammars()
    yield
    yield from t.run_until_idle()
    assert a.output_ids == ()
    again = t.start_req(prompt_len=20, regex=REGEX)
    yield from t.run_until_finished(again)
    assert t.engine_stats().grammar_hits == 1
    assert re.fullmatch(REGEX, again.client.text)


@scripted(STAGED, must_reach=["two wait"])
def test_a_grammar_that_fails_ends_its_requests(t):
    t.hold_grammars()
    two = [t.start_req(prompt_len=20, prompt_seed=seed, regex=REGEX) for seed in range(2)]
    other = t.start_req(prompt_len=20, prompt_seed=2, regex="[x-z]{2}")
    yield
    t.sometimes("two wait", len(t.state.waiting_for_grammar) == 3)
    t.fail_next_grammar()
    t.release_grammars()
    yield from t.run_until_all_finished([*two, other])
    assert [one.finish_reason for one in two] == ["error", "error"]
    assert all("failed as it was told to" in (one.client.error or "") for one in two)
    assert re.fullmatch("[x-z]{2}", other.client.text)
    # It is compiled again for the next one.
    again = t.start_req(prompt_len=20, regex=REGEX)
    yield from t.run_until_finished(again)
    assert re.fullmatch(REGEX, again.client.text)


@scripted(CONFIG, must_reach=["both wait"])
def test_abort_of_one_leaves_the_other(t):
    t.hold_grammars()
    a = t.start_req(prompt_len=20, regex=REGEX)
    b = t.start_req(prompt_len=20, prompt_seed=1, regex=REGEX)
    yield
    t.sometimes("both wait", len(t.state.waiting_for_grammar) == 2)
    t.abort(a)
    yield
    t.release_grammars()
    yield from t.run_until_finished(b)
    assert re.fullmatch(REGEX, b.client.text)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
@scripted(STAGED, must_reach=["ready in the pause"])
def test_ready_in_a_pause(t, mode):
    t.hold_grammars()
    a = t.start_req(prompt_len=20, regex=REGEX)
    b = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=6)
    yield from t.advance_to_decode_step(b, 2)
    t.pause_generation(mode)
    yield from t.run_until(lambda: not t.state.in_flight)
    t.release_grammars()
    yield
    t.sometimes("ready in the pause", t.state.paused == mode and not t.state.waiting_for_grammar)
    assert a.output_ids == ()
    t.continue_generation()
    yield from t.run_until_all_finished([a, b])
    assert re.fullmatch(REGEX, a.client.text)


@scripted(STAGED, must_reach=["flushed while it waits"])
def test_flush_and_update_while_it_waits(t):
    """A waiting request owns nothing, so neither is refused; its grammar is kept, since weights do not affect it."""
    t.hold_grammars()
    a = t.start_req(prompt_len=20, regex=REGEX)
    yield
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    t.sometimes("flushed while it waits", flush.status == 200 and t.state.waiting_for_grammar == [a.rid])
    update = t.update_weights("embedded:3")
    yield from t.run_until(lambda: update.done)
    assert update.status == 200, f"{a.rid} was started without its grammar: {update.text}"
    t.release_grammars()
    yield from t.run_until_finished(a)
    assert re.fullmatch(REGEX, a.client.text)
    assert t.engine_stats().grammars_compiled == 1


@scripted(STAGED)
def test_a_stalled_stage_compiles_nothing(t):
    t.stall_stage(1)
    r, gone = (t.start_req(prompt_len=20, prompt_seed=seed, regex=REGEX, max_new_tokens=16) for seed in range(2))
    for _ in range(3):
        yield
    assert t.state.waiting_for_grammar == [r.rid, gone.rid]
    t.abort(gone)
    yield
    t.resume_stage(1)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "stop"
