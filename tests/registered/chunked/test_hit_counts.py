"""Hit counts of a split prompt.

Goal: one request hits every node of its path twice, once when the prompt is confirmed and once at the end, regardless
of the number of parts. Method: a prompt of three chunks, published part by part. Origin: the exact hit counts of
SGLang's scripted runtime. Mutants: parts-of-a-prompt-count-as-hits, parts-are-not-counted.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK)


@scripted(ONE_STAGE)
def test_nodes_of_a_split_prompt_are_hit_twice(t):
    r = t.start_req(prompt_len=3 * CHUNK, max_new_tokens=2)
    yield from t.advance_to_nth_chunk(r, 3)
    assert set(t.get_all_node_hit_counts().values()) == {0}, "the prompt was counted before it was complete"
    yield from t.advance_to_decode_step(r, 1)
    assert set(t.get_all_node_hit_counts().values()) == {1}
    yield from t.run_until_finished(r)
    assert set(t.get_all_node_hit_counts().values()) == {2}
    assert t.state.kv.cached == 3 * CHUNK // t.state.kv.page_size


@scripted(PP4)
def test_parts_in_flight_are_published_once_they_are_all_back(t):
    r = t.start_req(prompt_len=3 * CHUNK, max_new_tokens=2)
    yield from t.advance_to_nth_chunk(r, 3)
    assert t.state.tree.nodes == 0
    yield from t.advance_to_decode_step(r, 1)
    assert list(t.get_all_node_hit_counts().values()) == [1]
    yield from t.run_until_finished(r)
    assert list(t.get_all_node_hit_counts().values()) == [2]
