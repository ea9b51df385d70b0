"""Scripts that are wrong on purpose: each tests nothing, and each is refused at its line or counted in the summary.

Goal: a script that tests nothing never passes without a message. Method: one mistake a script, written from the page
of the contract, run by hand on one engine of each tier. Origin: scripts that were green and should not have been; D02,
D03, D08. Those marked ``was_green`` passed in silence before this file was there. Mutant: none, the harness is what
is tested.
"""

import contextlib
import os
from collections.abc import Callable
from typing import Any

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import BadCall, ScriptDefinitionError, ScriptedSim, ScriptFailed, ScriptOptions, scripted

register_cpu_ci(est_time=4, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)
PP2 = EngineConfig(pp_size=2, pp_async_depth=1, chunked_prefill_size=64)

REFUSED: list[Any] = []
COUNTED: list[Any] = []

Script = Callable[..., Any]


def refused(words: str) -> Callable[[Script], Script]:
    """The script is refused at its own line with these words."""

    def note(script: Script) -> Script:
        REFUSED.append(pytest.param(script, words, id=script.__name__))
        return script

    return note


def counted(what: str, count: int = 1) -> Callable[[Script], Script]:
    """The script passes, and this is counted of it."""

    def note(script: Script) -> Script:
        COUNTED.append(pytest.param(script, what, count, id=script.__name__))
        return script

    return note


def was_green(script: Script) -> Script:
    """It passed without a word before."""
    script.__dict__["was_green"] = True
    return script


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


@refused("finish_reason is one of abort, error, length, stop; it can never be 'aborted'")
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


# -- what is no Python mistake, but none that passes either --


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


@refused("the script was left by Skipped")
def skips_itself(t):
    yield
    pytest.skip("not today")


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


@refused("the engine is fully idle, so no further step can change anything")
def waits_for_nothing_at_all(t):
    yield from t.run_until(lambda: t.state.running, max_steps=5)


@refused("nothing is known to stand in its way; max_steps=N allows more")
def waits_too_short(t):
    r = t.start_req(prompt_len=10, max_new_tokens=50)
    yield from t.run_until_finished(r, max_steps=5)


# -- what may be meant, and is counted --


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


# -- how each is refused --


def _run(engine: Any, script: Script) -> Any:
    windows = ("window",) if script is misspells_its_window else ()
    return engine.run(script, options=ScriptOptions(must_reach=windows, timeout_s=20))


@pytest.mark.parametrize(("script", "words"), REFUSED)
def test_a_wrong_script_is_refused_at_its_line(harness, script: Script, words: str) -> None:
    """D02, D03: with the remedy, and without the harness's own lines."""
    with harness(ONE_STAGE) as engine, pytest.raises(ScriptFailed) as caught:
        _run(engine, script)
    text = str(caught.value).replace("\n", " ")
    assert all(part in text for part in words.split("|")[-1].split(".*")), text
    assert f"in {script.__name__}" in text
    assert f"{os.sep}scripted{os.sep}" not in text.split("The last steps")[0].replace(f"tests{os.sep}", "")


@pytest.mark.parametrize(("script", "what", "count"), COUNTED)
def test_what_may_be_meant_is_counted(harness, script: Script, what: str, count: int) -> None:
    with harness(ONE_STAGE) as engine:
        assert _run(engine, script).loose_ends.get(what) == count


def test_thirty_wrong_scripts_were_green() -> None:
    """The tables are not empty, and say which wrong scripts would have passed unnoticed."""
    scripts = [parameter.values[0] for parameter in (*REFUSED, *COUNTED)]
    assert len(scripts) >= 50
    assert sum(getattr(script, "was_green", False) for script in scripts) >= 30


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


# -- what is refused where it is decorated --

HEAD = "from engine import EngineConfig\nfrom scripted import scripted\nONE = EngineConfig()\n"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "r = t.start_req(prompt_len=5)\n    yield\n    r.finish_reason == 'stop'",
            "write 'assert r.finish_reason == ",
        ),
        ("yield\n    not t.state.running", "write 'assert not t.state.running'"),
        ("yield\n    t.flush_cache", "'t.flush_cache' does nothing; call it"),
        ("yield\n    assert (t.state.running, 'nothing runs')", "always holds, because a tuple is true"),
        ("yield\n    assert (r.finished for r in ())", "always holds"),
        ("yield\n    assert 'no retraction'", "always holds"),
        ("helper(t)\n    yield", "makes a generator that never runs; write 'yield from helper"),
    ],
)
def test_what_comes_to_nothing_is_refused_at_collection(body: str, words: str, tmp_path) -> None:
    """D08: with the line of it."""
    file = tmp_path / "test_comes_to_nothing.py"
    text = f"{HEAD}def helper(t):\n    yield\n\ndef test_a(t):\n    {body}\n\nscripted(ONE)(test_a)\n"
    file.write_text(text)
    with pytest.raises(ScriptDefinitionError, match=r"tests nothing in line \d+") as caught:
        exec(compile(text, str(file), "exec"), {})
    assert words in str(caught.value)


def test_a_look_that_must_raise_is_no_idle_statement() -> None:
    def looks(t):
        flush = t.flush_cache()
        with pytest.raises(BadCall):
            flush.status  # noqa: B018 - looking is the test
        yield

    with ScriptedSim.start(ONE_STAGE) as sim:
        sim.run(looks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"must_reach": "window"}, "write must_reach=['window']"),
        ({"must_reach": ["a", ""]}, "names that are not empty"),
        ({"must_reach": ["a", "a"]}, "names each window once"),
        ({"tiers": ("sim", "sim")}, "each once"),
        ({"max_steps": 2.5}, "whole number"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number of seconds > 0"),
        ({"oracle": "no"}, "True or False"),
    ],
)
def test_options_that_mean_something_else_are_refused(options: dict[str, Any], words: str) -> None:
    """D08"""
    with pytest.raises(ScriptDefinitionError) as caught:
        scripted(ONE_STAGE, **options)
    assert words in str(caught.value)
