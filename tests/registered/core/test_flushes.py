"""Flushing the cache.

Goal: a flush clears tree, pages and rows when no request owns memory, and is refused with the counts otherwise. Method:
flush at idle, while a request runs, is partly prefilled, or waits. Origin: the core contracts of SGLang's scripted
runtime; B15. Mutants: flush-answers-but-does-nothing, refusal-names-no-counts, flush-refused-by-the-queue.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)


@scripted(ONE_STAGE)
def test_flush_forgets_a_prefix(t):
    prompt = list(range(32, 32 + 80))
    yield from t.warmup_radix(prompt)
    warm = t.start_req(prompt_ids=prompt, max_new_tokens=2)
    yield from t.run_until_finished(warm)
    assert warm.cached_tokens == 64
    flush = t.flush_cache()
    yield
    assert flush.arrived
    assert flush.status == 200
    assert t.state.kv.free == t.state.kv.total, "the cache is still there"
    assert t.state.tree.nodes == 0
    cold = t.start_req(prompt_ids=prompt, max_new_tokens=2)
    yield from t.run_until_finished(cold)
    assert cold.cached_tokens == 0
    assert cold.output_ids == warm.output_ids


@scripted(ONE_STAGE)
def test_flush_is_refused_with_the_counts(t):
    runs = t.start_req(prompt_len=20, max_new_tokens=20)
    yield from t.advance_to_decode_step(runs, 1)
    chunked = t.start_req(prompt_len=4 * CHUNK, prompt_seed=1, max_new_tokens=2)
    waits = t.start_req(prompt_len=4 * CHUNK, prompt_seed=2, max_new_tokens=2)
    yield
    flush = t.flush_cache()
    yield
    assert flush.status == 400
    for count in ("waiting=1", "chunked=1", "running=1", "in_flight="):
        assert count in flush.text
    yield from t.run_until_all_finished([runs, chunked, waits])


@scripted(ONE_STAGE)
def test_requests_that_wait_do_not_refuse_a_flush(t):
    t.pause_generation("in_place")
    r = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    flush = t.flush_cache()
    yield
    assert flush.status == 200
    assert r.status == "waiting"
    t.continue_generation()
    yield from t.run_until_finished(r)
