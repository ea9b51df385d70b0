"""One stage, one process for model and scheduler: the same scripts, the same loop, a pipeline of depth one.

Goal: prefill, chunked prefill, decode, batching and the prefix cache work without pipeline stages. Method: small
scripts, one claim each. Origin: the smoke tests of SGLang's scripted runtime; B01, B02, B04, B05, B13. Mutants:
cached-prompt-never-runs, flush-answers-but-does-nothing, one-token-late, parts-are-not-counted, one-request-a-batch,
a-whole-prompt-counts-as-a-part.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)


@scripted(ONE_STAGE)
def test_a_short_prompt_takes_one_pass(t):
    r = t.start_req(prompt_len=20, max_new_tokens=4)
    yield
    assert t.last_batch_forward_mode == "prefill"
    assert r.status == "running"
    yield from t.run_until_finished(r)
    assert t.last_batch_forward_mode == "decode"
    assert r.chunks_done == 0
    assert r.client.status == 200
    assert r.client.token_ids == r.output_ids
    assert len(r.client.text) == 4
    assert t.is_fully_idle


@scripted(ONE_STAGE)
def test_a_long_prompt_is_split(t):
    r = t.start_req(prompt_len=5 * CHUNK - 3, max_new_tokens=2)
    yield from t.advance_to_nth_chunk(r, 2)
    assert r.is_chunking
    assert t.state.chunked == r.rid
    assert r.remaining_prompt_tokens == 3 * CHUNK - 3
    yield from t.run_until_finished(r)
    assert r.chunks_done == 5


@scripted(ONE_STAGE, must_reach=["two requests in one decode batch"])
def test_requests_decode_in_one_batch(t):
    """B01: continuous batching, with a batch larger than one."""
    requests = [t.start_req(prompt_len=20 + i, prompt_seed=i, max_new_tokens=6) for i in range(3)]
    while not all(r.finished for r in requests):
        yield
        decodes = t.batch_composition()["decode"]
        t.sometimes("two requests in one decode batch", len(decodes) > 1)
    assert not t.list_active_reqs()


@scripted(ONE_STAGE)
def test_an_equal_prompt_hits_the_cache_and_still_computes(t):
    """B04: a fully cached prompt computes one token; B13: only confirmed KV was there to be hit."""
    prompt = list(range(32, 32 + 4 * 16))
    first = t.start_req(prompt_ids=prompt, max_new_tokens=3)
    yield from t.run_until_finished(first)
    second = t.start_req(prompt_ids=prompt, max_new_tokens=3)
    yield from t.run_until_finished(second)
    assert first.cached_tokens == 0
    assert second.cached_tokens == 3 * 16
    assert second.output_ids == first.output_ids


@scripted(ONE_STAGE)
def test_flush_clears_the_tree_when_idle(t):
    r = t.start_req(prompt_len=2 * CHUNK, max_new_tokens=2)
    yield from t.run_until_finished(r)
    assert t.state.kv.cached
    assert t.get_all_node_hit_counts()
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 200
    assert t.state.kv.cached == 0
    assert not t.get_all_node_hit_counts()
