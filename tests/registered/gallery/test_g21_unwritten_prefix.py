"""G21: a step fails before its result, and the same prompt comes again.

Goal: pages that no confirmed step has written are never hit. Method: make the prefill of a prompt fail, start the same
prompt, look at what it takes from the cache. Origin: TGI pull request 2489; A05, B13. Mutant:
prefix-published-before-its-result.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")

CHUNK = 64
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@pytest.mark.parametrize("stage", [0, 3])
@scripted(PP4)
def test_a_failed_step_leaves_no_prefix(t, stage):
    t.fail_next_step(stage)
    a = t.start_req(prompt_len=60, max_new_tokens=4)
    yield from t.run_until_finished(a)
    assert a.finish_reason == "error"
    assert f"stage {stage}" in a.client.error or "told to" in a.client.error
    b = t.start_req(prompt_len=60, max_new_tokens=4)
    yield from t.run_until_finished(b)
    assert b.cached_tokens == 0, "a prefix was hit that was never prefilled"
    assert b.finish_reason == "length"


@scripted(PP4)
def test_a_failed_chunk_leaves_no_prefix(t):
    """The first part of the prompt was computed, the second failed, a third may be in flight after it."""
    a = t.start_req(prompt_len=4 * CHUNK - 3, max_new_tokens=4)
    yield from t.advance_to_nth_chunk(a, 1)
    t.fail_next_step(1)
    yield from t.run_until_finished(a)
    assert a.finish_reason == "error"
    yield from t.run_until_idle()
    b = t.start_req(prompt_len=4 * CHUNK - 3, max_new_tokens=4)
    yield from t.run_until_finished(b)
    assert b.cached_tokens <= CHUNK
    assert b.finish_reason == "length"
