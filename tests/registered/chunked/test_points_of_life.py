"""Retract and abort at five points of a split prompt's life.

Goal: at the first and the last chunk, at the first, the middle and the last decode, a retraction changes no token and
an abort frees everything. Method: the same request, stopped at each point, on four stages. Origin: the chunked
prefill tests of SGLang's scripted runtime; B06, B11. Mutants: retraction-waits-for-one-result,
abort-ignores-in-flight.
"""

import pytest

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=60, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)
POINTS = ["first_chunk", "last_chunk", "first_decode", "mid_decode", "last_decode"]


@pytest.mark.parametrize("point", POINTS)
@scripted(PP4)
def test_retract_at(t, point):
    r = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=6)
    other = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=12)
    yield from t.advance_to_stage(r, point)
    t.pause_generation("retract")
    yield
    t.continue_generation()
    yield from t.run_until_all_finished([r, other])
    assert r.finish_reason == other.finish_reason == "length"
    assert r.retractions + other.retractions >= 1
    yield from t.run_until_idle()
    assert t.state.kv.held == 0


@pytest.mark.parametrize("point", POINTS)
@scripted(PP4)
def test_abort_at(t, point):
    r = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=6)
    other = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=12)
    yield from t.advance_to_stage(r, point)
    said = len(r.output_ids)
    t.abort(r)
    yield from t.run_until_finished(r, max_steps=1)
    assert r.finish_reason == "abort"
    # The result that lands in the step of the abort comes before it.
    assert len(r.output_ids) <= said + 1
    yield from t.run_until_finished(other)
    yield from t.run_until_idle()
    assert t.state.kv.held == 0
    assert t.state.rows.free == t.state.rows.total
    assert set(t.get_all_node_lock_refs().values()) <= {0}
