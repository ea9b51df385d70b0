"""The harness itself: steps, empty and failing scripts, survival, shutdown, an engine that cannot be brought to idle.

Goal: a script gets exactly the steps that it yields, and the next script finds a clean engine or is told why not.
Method: scripts run by hand on one engine of each tier. Origin: the core contracts of SGLang's scripted runtime; D02,
D05, D07, D08. Mutant: dropped-result-leaks-its-slot, which makes the engine that stays dirty.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.errors import EngineError
from scripted import ScriptDefinitionError, ScriptError, ScriptFailed, ScriptOptions, ServerDirty, scripted

register_cpu_ci(est_time=4, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)


def seven_steps(t):
    for expected in range(7):
        assert t.state.step == expected
        yield
    assert t.state.step == len(t.history) == 7


def no_step_at_all(t):
    return
    yield


def fails_in_its_third_step(t):
    r = t.start_req(prompt_len=200, max_new_tokens=20)
    yield
    yield
    assert r.finished, "as it was meant to"


def leaves_everything_behind(t):
    for seed in range(3):
        t.start_req(prompt_len=200, prompt_seed=seed, max_new_tokens=200)
    yield
    t.pause_generation("in_place")
    t.hold_results()
    t.exhaust_rows(0)
    yield


def finds_a_clean_engine(t):
    assert t.is_fully_idle
    assert t.state.step == 0
    assert t.state.paused is None
    assert t.state.kv.free == t.state.kv.total
    assert t.state.rows.free == t.state.rows.total
    assert t.engine_stats().requests_started == 0
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield from t.run_until_finished(r)


def aborts_in_flight(t):
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    t.abort(r)
    yield


def forgets_to_yield_from(t):
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    t.run_until_finished(r)


def waits_in_vain(t):
    yield from t.run_until(lambda: t.state.step > 10_000, max_steps=5)


def is_no_generator(t):
    return 1


def test_one_step_per_yield(harness):
    with harness(ONE_STAGE) as engine:
        assert engine.run(seven_steps).steps == 7


def test_an_empty_script_runs_no_step(harness):
    with harness(ONE_STAGE) as engine:
        assert engine.run(no_step_at_all).steps == 0


def test_a_failing_script_says_where_and_the_engine_survives(harness):
    with harness(ONE_STAGE) as engine:
        with pytest.raises(ScriptFailed, match="as it was meant to") as caught:
            engine.run(fails_in_its_third_step)
        assert "fails_in_its_third_step" in str(caught.value)
        assert engine.run(finds_a_clean_engine).steps > 0


def test_what_a_script_leaves_behind_is_gone(harness):
    with harness(ONE_STAGE) as engine:
        engine.run(leaves_everything_behind)
        engine.run(finds_a_clean_engine)


def test_a_wait_that_is_not_yielded_from_is_found(harness):
    with harness(ONE_STAGE) as engine, pytest.raises(ScriptFailed, match="yield from"):
        engine.run(forgets_to_yield_from)


def test_a_spent_budget_shows_the_state(harness):
    with harness(ONE_STAGE) as engine, pytest.raises(ScriptFailed, match=r"within 5 steps; step 5: waiting=\[\]"):
        engine.run(waits_in_vain)


def test_what_is_no_generator_is_refused(harness):
    with pytest.raises(ScriptDefinitionError, match="never yields"):
        scripted(ONE_STAGE)(is_no_generator)
    with harness(ONE_STAGE) as engine:
        with pytest.raises((ScriptError, ScriptDefinitionError), match="generator"):
            engine.run(is_no_generator)
        engine.run(finds_a_clean_engine)


def test_an_engine_that_stays_dirty_says_so(harness):
    """D05: the error names what is still in flight."""
    mutant = "dropped-result-leaks-its-slot"
    with harness(PP4, mutant=mutant) as engine, pytest.raises(ServerDirty, match="releasing=1"):
        engine.run(aborts_in_flight, options=ScriptOptions(check_every_step=False))


def test_shutdown_is_idempotent(harness):
    with harness(ONE_STAGE) as engine:
        engine.run(no_step_at_all)
        engine.shutdown()
        engine.shutdown()
        with pytest.raises(EngineError, match="shut down"):
            engine.run(no_step_at_all)
