"""A bound on the requests of one microbatch: ``pp_max_micro_batch_size``.

Goal: no microbatch has more requests than that, prompts and decodes together, and as many as that go at once in every
place of the pipeline. Method: many short requests, on one stage and on two, with prompts and decodes in one microbatch
and without. Origin: SGLang issues 38118 and 23789, vLLM issue 27462. Mutants: microbatch-one-short-beside-a-chunk,
microbatch-bound-counts-all-that-run, microbatch-without-a-bound.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

MOST = 2
PP2 = EngineConfig(pp_size=2, chunked_prefill_size=64, pp_max_micro_batch_size=MOST)
MIXED = EngineConfig(pp_size=2, chunked_prefill_size=64, pp_max_micro_batch_size=MOST, mixed_chunk=True)
ALONE = EngineConfig(pp_size=2, chunked_prefill_size=64, pp_max_micro_batch_size=1, mixed_chunk=True)
FULL = "a microbatch is as large as it may be"
BESIDE = "the end of a split prompt and the beginning of another are in one microbatch"


def _largest(t):
    return max(len(one.microbatch.segments) for one in t.history if one.microbatch is not None)


@scripted(PP2, must_reach=[FULL])
def test_prompts_and_decodes_are_bounded(t):
    requests = [t.start_req(prompt_len=5, prompt_seed=i, max_new_tokens=4) for i in range(7)]
    yield from t.run_until_all_finished(requests)
    assert _largest(t) <= MOST, "a microbatch has more requests than it may"
    t.sometimes(FULL, _largest(t) == MOST)
    decodes = [len(one.microbatch.segments) for one in t.history if one.microbatch and one.microbatch.mode == "decode"]
    assert max(decodes) == MOST


@scripted(PP2, must_reach=[BESIDE])
def test_a_chunk_takes_one_place_and_no_more(t):
    a = t.start_req(prompt_len=100, max_new_tokens=1)
    b = t.start_req(prompt_len=5, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_all_finished([a, b])
    shared = [one.microbatch.rids for one in t.history if one.microbatch and len(one.microbatch.segments) == MOST]
    assert shared, "a place stays empty beside a chunk"
    t.sometimes(BESIDE, shared == [(a.rid, b.rid)])


@scripted(PP2)
def test_every_place_of_the_pipeline_has_as_many(t):
    first = [t.start_req(prompt_len=5, prompt_seed=i, max_new_tokens=12) for i in range(MOST)]
    yield from t.run_until(lambda: all(r.output_ids for r in first))
    second = [t.start_req(prompt_len=5, prompt_seed=9 + i, max_new_tokens=12) for i in range(MOST)]
    for _ in range(4):
        yield
    assert all(r.status == "running" for r in second), "the bound counts all that run"
    yield from t.run_until(lambda: len(t.state.in_flight) == 2)
    yield
    assert [len(one.rids) for one in t.state.in_flight] == [MOST, MOST]
    yield from t.run_until_all_finished([*first, *second])


@scripted(MIXED)
def test_decodes_leave_a_place_to_prompts(t):
    runs = [t.start_req(prompt_len=5, prompt_seed=i, max_new_tokens=12) for i in range(4)]
    yield from t.run_until(lambda: all(r.output_ids for r in runs))
    late = t.start_req(prompt_len=5, prompt_seed=9, max_new_tokens=1)
    yield
    assert late.status == "running"
    assert t.last_batch_forward_mode == "mixed"
    yield from t.run_until_all_finished([*runs, late])
    assert _largest(t) == MOST


@scripted(ALONE)
def test_a_bound_of_one_still_serves_all(t):
    requests = [t.start_req(prompt_len=5 + 40 * i, prompt_seed=i, max_new_tokens=3) for i in range(4)]
    yield from t.run_until_all_finished(requests)
    assert _largest(t) == 1
    assert {r.finish_reason for r in requests} == {"length"}
