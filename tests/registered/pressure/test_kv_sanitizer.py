"""The KV sanitizer: no request reads a page that another has written.

Goal: every read of the KV cache finds KV that the request itself, or its prefix, has written; when a bookkeeping bug
breaks that, the stages report it. Method: a request decodes on a prefix while everything evictable is evicted and
another request takes the free pages; once healthy, once with protected prefixes evicted. Origin: the shadow of the KV
cache on every stage; B08, B11. Mutant: locked-prefix-is-evicted.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import ScriptedSim, ScriptError, ScriptOptions

register_cpu_ci(est_time=2, suite="base-cpu")

PAGE = 16
SANITIZED = EngineConfig(
    pp_size=2, pp_async_depth=1, chunked_prefill_size=64, max_total_tokens=16 * PAGE, kv_sanitizer=True
)


def reuse_pages_beside_a_live_request(t):
    alone = t.start_req(prompt_len=4 * PAGE, max_new_tokens=12)
    yield from t.run_until_finished(alone)
    t.evict()
    r = t.start_req(prompt_len=4 * PAGE, max_new_tokens=12)
    yield from t.advance_to_decode_step(r, 1)
    older = t.start_req(prompt_len=4 * PAGE, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_finished(older)
    t.evict()
    newer = t.start_req(prompt_len=4 * PAGE, prompt_seed=2, max_new_tokens=1)
    yield from t.run_until_finished(newer)
    yield from t.run_until_finished(r)
    assert r.finish_reason == "length", r.error
    assert r.output_ids == alone.output_ids, "it read what is not its own"


def test_healthy_reads_are_one_s_own(harness):
    with harness(SANITIZED) as engine:
        assert engine.run(reuse_pages_beside_a_live_request).compared == 4


def test_stages_see_a_page_of_somebody_else(harness):
    options = ScriptOptions(check_every_step=False)
    with harness(SANITIZED, mutant="locked-prefix-is-evicted") as engine, pytest.raises(ScriptError) as caught:
        engine.run(reuse_pages_beside_a_live_request, options=options)
    signature = "it read what is not its own" if isinstance(engine, ScriptedSim) else "KV"
    assert signature in str(caught.value)
