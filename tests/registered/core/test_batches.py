"""Batches: forward modes, the composition of a batch, the active list, the idle flags.

Goal: the queries agree with each other and with the steps that were recorded. Method: ask after every step of mixed
workloads, with and without decodes in prefill microbatches. Origin: the core contracts of SGLang's scripted runtime;
B01. Mutants: finished-requests-stay-registered, every-chunk-emits-a-token, decodes-always-join-a-prefill,
decodes-never-join-a-prefill, flush-ignores-in-flight.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

CHUNK = 64
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK)
MIXED = EngineConfig(chunked_prefill_size=CHUNK, mixed_chunk=True)
ALL_MODES = "prefill, decode and mixed microbatches"
ALL_PARTS = "the end of a prompt and decodes in one microbatch"


@scripted(MIXED, must_reach=[ALL_MODES, ALL_PARTS])
def test_batch_composition_is_disjoint(t):
    requests = [t.start_req(prompt_len=10, prompt_seed=i, max_new_tokens=10) for i in range(2)]
    yield from t.run_until(lambda: len(t.state.running) == 2)
    requests.append(t.start_req(prompt_len=2 * CHUNK + 20, prompt_seed=5, max_new_tokens=2))
    modes = {step.microbatch.mode.value for step in t.history if step.microbatch is not None}
    while not all(r.finished for r in requests):
        yield
        parts = t.batch_composition()
        named = [*parts["prefill"], *parts["decode"], *parts["chunked"]]
        assert len(set(named)) == len(named)
        assert set(parts["running"]) == set(t.state.running)
        modes.add(t.last_batch_forward_mode)
        t.sometimes(ALL_PARTS, parts["prefill"] and parts["decode"])
    t.sometimes(ALL_MODES, modes == {"prefill", "decode", "mixed"})


@scripted(ONE_STAGE)
def test_forward_modes_without_mixing(t):
    assert t.last_batch_forward_mode is None
    first = t.start_req(prompt_len=10, max_new_tokens=6)
    yield
    assert t.last_batch_forward_mode == "prefill"
    yield
    assert t.last_batch_forward_mode == "decode"
    second = t.start_req(prompt_len=10, prompt_seed=1, max_new_tokens=2)
    yield
    assert t.last_batch_forward_mode == "prefill"
    yield from t.run_until_all_finished([first, second])
    assert {step.microbatch.mode.value for step in t.history if step.microbatch} == {"prefill", "decode"}


@scripted(ONE_STAGE)
def test_active_list_and_idle_flags(t):
    assert t.is_fully_idle
    assert not t.list_active_reqs()
    requests = [t.start_req(prompt_len=10, prompt_seed=i, max_new_tokens=2 + i) for i in range(3)]
    yield
    assert [req.rid for req in t.list_active_reqs()] == [r.rid for r in requests]
    assert not t.is_fully_idle
    assert not t.state.is_quiescent
    yield from t.run_until_finished(requests[0])
    assert [req.rid for req in t.list_active_reqs()] == [r.rid for r in requests[1:]]
    yield from t.run_until_all_finished(requests)
    assert t.is_fully_idle
    assert t.state.is_quiescent
    assert t.state.queues_clear


@scripted(ONE_STAGE)
def test_a_list_that_is_returned_is_a_copy(t):
    r = t.start_req(prompt_len=10, max_new_tokens=3)
    yield
    t.list_active_reqs().clear()
    t.batch_composition()["prefill"].clear()
    t.get_all_node_lock_refs().clear()
    assert t.batch_composition()["prefill"] == [r.rid]
    yield from t.run_until_finished(r)
