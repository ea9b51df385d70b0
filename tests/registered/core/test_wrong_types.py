"""Scripts that confuse types: a number for a text, a handle for a wait, one kind of value for another.

Goal: what can have only one result is refused at its line, and so is an argument that would reach the engine as
something else. Method: one mistake a script, written from the page of the contract by a reader of it, on one engine of
each tier. Origin: scripts that were green, or that killed the engine; D08. Mutant: none, the harness is what is tested.
"""

import pytest
from wrong_scripts import ONE_STAGE, Script, Table, check_refused, was_green

from ci.register import register_cpu_ci
from scripted import BudgetSpent, ScriptSucceeded

register_cpu_ci(est_time=8, suite="base-cpu")

TABLE = Table()
refused = TABLE.add


# -- answers --


@refused("the status 200 is a number; it can never be the text '500'")
@was_green
def compares_a_client_s_status_with_a_text(t):
    r = t.start_req(prompt_len=5, max_new_tokens=1)
    yield from t.run_until_finished(r)
    yield from t.run_until(lambda: r.client.closed)
    assert r.client.status != "500"


@refused("the status 200 is a number; it can never be the text '400'")
@was_green
def compares_an_answer_s_status_with_a_text(t):
    call = t.flush_cache()
    yield from t.run_until(lambda: call.done)
    assert call.status != "400"


@refused("a status is always true")
@was_green
def takes_a_status_for_an_end(t):
    requests = [t.start_req(prompt_len=5) for _ in range(2)]
    yield
    assert all(r.status for r in requests)


# -- membership tests --


@refused("'a' is looked for among values of type MicrobatchInFlight")
@was_green
def looks_for_a_rid_among_microbatches(t):
    t.start_req(prompt_len=5, rid="a")
    yield
    assert "a" not in t.state.in_flight


@refused("'a' is looked for among values of type StepRecord")
@was_green
def looks_for_a_rid_in_the_history(t):
    t.start_req(prompt_len=5, rid="a")
    yield
    assert "a" not in t.history


@refused("3 is looked for among values of type str")
@was_green
def looks_for_a_number_among_rids(t):
    t.start_req(prompt_len=5, max_new_tokens=9)
    yield from t.run_until(lambda: t.state.running)
    assert 3 not in t.state.running


@refused("t.batch_composition() has prefill, decode, chunked, running, and no 'prefil' (did you mean 'prefill'?)")
@was_green
def misspells_a_part_of_the_batch(t):
    t.start_req(prompt_len=5)
    yield
    assert not t.batch_composition().get("prefil")


@refused("KVState is compared with 0, which it can never equal; compare one of .total, .free")
@was_green
def compares_all_counts_with_one(t):
    t.start_req(prompt_len=5)
    yield
    assert t.state.kv != 0


@refused("the method t.clock.now is compared with the method t.clock.now")
@was_green
def compares_a_method_with_itself(t):
    t.start_req(prompt_len=5)
    before = t.clock.now
    yield
    assert t.clock.now == before


# -- yielded values that are no waits --


@refused("is neither a wait nor a sequence; write it without 'yield from'")
def waits_for_a_handle(t):
    yield from t.start_req(prompt_len=5)


@refused("is neither a wait nor a sequence; write it without 'yield from'")
def waits_for_a_call(t):
    yield
    yield from t.flush_cache()


# -- arguments --


@refused("t.hold_results(): too many positional arguments; it takes nothing")
def gives_too_much(t):
    t.hold_results(3)
    yield


@refused("t.exhaust_kv(): missing a required argument: 'leave_pages'; it takes leave_pages")
def gives_too_little(t):
    t.exhaust_kv()
    yield


@refused("update_weights() takes model_path as a text, such as 'embedded:7', got 7")
def gives_a_number_for_weights(t):
    t.update_weights(7)
    yield


@refused("flush_cache() takes timeout_s in virtual seconds, or None, got '5'")
@was_green
def gives_a_text_for_seconds(t):
    t.flush_cache(timeout_s="5")
    yield


@refused("start_req() takes prompt_len >= 1, a whole number, got '5'")
def gives_a_text_for_a_length(t):
    t.start_req(prompt_len="5")
    yield


@refused("sampling_params.temperature must be a number, got 'hot'")
def gives_a_text_for_a_temperature(t):
    t.start_req(prompt_len=5, temperature="hot")
    yield


@refused("sampling_params.logit_bias must be an object, got [1]")
def gives_a_list_for_biases(t):
    t.start_req(prompt_len=5, logit_bias=[1])
    yield


@refused("input_ids must be a list, got 5")
def gives_a_number_for_a_prompt(t):
    t.start_req(prompt_ids=5)
    yield


@refused("evict() takes 0 to 0 pages, which is all the unlocked cache there is, got 'all'")
def gives_a_text_for_pages(t):
    yield
    t.evict("all")


# -- values without a JSON form: changed in one tier, a hang in the other --


@refused("start_req() takes timeout_s as a finite number, got nan, which JSON cannot express")
@was_green
def gives_no_number_for_a_limit(t):
    t.start_req(prompt_len=5, timeout_s=float("nan"))
    yield


@refused("start_req() takes text as a JSON value, got b'abc', a bytes")
@was_green
def gives_bytes_for_a_text(t):
    t.start_req(text=b"abc")
    yield


@refused("start_req() takes prompt_ids as a JSON value, got {5, 6}, a set;.*sorted(...)")
@was_green
def gives_a_set_for_a_prompt(t):
    t.start_req(prompt_ids={5, 6})
    yield


@refused("start_req() takes rid as a text that UTF-8 can encode, got '\\ud800'")
def gives_half_a_character_for_a_rid(t):
    t.start_req(prompt_len=5, rid="\ud800")
    yield


@refused("POST /v1/unload_lora_adapter takes lora_name as a JSON value, got b'x'")
@was_green
def gives_bytes_for_a_name(t):
    t.unload_lora(b"x")
    yield


# -- values that a route refuses, with the same words in both tiers --


@refused("POST /flush_cache?timeout=-1 was refused with 400: timeout must be from 0 to 3600 seconds, got -1")
@was_green
def flushes_before_now(t):
    t.flush_cache(timeout_s=-1)
    yield


@refused("POST /abort_request was refused with 400: rid must have >= 1 characters, got ''")
@was_green
def aborts_a_request_without_a_name(t):
    t.abort("")
    yield


@refused("POST /v1/load_lora_adapter was refused with 400: lora_name must be a string, got 5")
@was_green
def gives_a_number_for_a_name(t):
    t.load_lora(5, "embedded-lora:1")
    yield


@refused("POST /v1/load_lora_adapter was refused with 400: lora_name must differ from the served model's name")
def gives_a_lora_the_name_of_the_model(t):
    t.load_lora("embedded", "embedded-lora:1")
    yield


@refused("load_lora() takes path as a text, such as 'embedded-lora:1', got None")
@was_green
def gives_nothing_for_a_lora(t):
    t.load_lora("x", None)
    yield


@refused("release_grammars() takes n >= 1, or None for all, got 1.5")
@was_green
def releases_a_part_of_a_grammar(t):
    t.release_grammars(1.5)
    yield


# -- values that are always true --


@refused("<virtual time: 0 s> is compared with 5")
@was_green
def takes_the_clock_for_its_time(t):
    yield
    assert t.clock != 5


@refused("t.batch_composition() always has prefill, decode, chunked, running")
@was_green
def takes_the_parts_of_a_batch_for_a_batch(t):
    t.start_req(prompt_len=5)
    yield from t.run_until(lambda: t.batch_composition())


@refused("t.state is only to be read and cannot be set to 3")
def sets_the_state(t):
    t.state = 3
    yield


# -- queries without a step --


@refused("run_until() calls its predicate without an argument, but: missing a required argument: 't'")
def gives_a_predicate_that_takes_something(t):
    yield from t.run_until(lambda t: t.is_fully_idle)


@refused("scripted-1 did not finish, because no step ran between its questions")
def runs_a_wait_by_itself(t):
    r = t.start_req(prompt_len=5)
    yield
    list(t.run_until_finished(r))


@pytest.mark.parametrize(("script", "words"), TABLE.cases)
def test_what_is_of_another_type_is_refused_at_its_line(harness, script: Script, words: str) -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    with harness(ONE_STAGE) as engine:
        check_refused(engine, script, words)


def test_half_of_these_were_green() -> None:
    assert TABLE.were_green() == 21


def spends_a_budget_and_says_nothing(t):
    r = t.start_req(prompt_len=5)
    t.hold_results()
    try:
        yield from t.run_until_finished(r, max_steps=3)
    except BudgetSpent:
        t.release_results()
    yield from t.run_until_finished(r)


def test_a_budget_that_a_script_spends_and_catches_is_counted(harness) -> None:
    """D08: it may be meant."""
    with harness(ONE_STAGE) as engine:
        outcome = engine.run(spends_a_budget_and_says_nothing)
    assert isinstance(outcome, ScriptSucceeded)
    assert outcome.loose_ends == {"spent budgets that the script caught": 1}
