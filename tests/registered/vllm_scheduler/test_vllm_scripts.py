"""Scripts on vLLM's own scheduler: its users' calls between two steps, step by step.

Goal: a race of vLLM is a test of a few lines. Method: asynchronous scheduling, so that results are one step late.
Origin: vLLM pull requests 20739, 46066 and 48245. Mutant: preempted-while-in-flight, flush-drops-the-next-token.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted import scripted

register_cpu_ci(est_time=20, suite="vllm-cpu")


@scripted(adapter="vllm", async_scheduling=True, must_reach=["two results are in flight"])
def test_a_forced_flush_while_results_are_in_flight(t):
    """Work in flight is dropped and computed again; no token is repeated or lost."""
    a = t.start_req(prompt_len=9, max_new_tokens=6)
    while len(a.output_ids) < 2:
        yield
    t.hold_results()
    yield
    yield
    t.sometimes("two results are in flight", len(t.state.in_flight) == 2)
    flush = t.flush_cache(force=True)
    t.release_results()
    yield from t.run_until_finished(a)
    assert flush.status == 200
    assert a.finish_reason == "length"


@scripted(
    adapter="vllm",
    async_scheduling=True,
    pipeline_parallel_size=2,
    num_speculative_tokens=3,
    num_gpu_blocks=9,
    must_reach=["preempted with a result in flight"],
)
def test_a_preemption_with_a_result_in_flight(t):
    """Requests that do not fit together have their solo outputs, with any guesses in flight."""
    requests = [t.start_req(prompt_len=9, prompt_seed=seed, max_new_tokens=14) for seed in range(3)]
    while not all(r.finished for r in requests):
        yield
        t.sometimes("preempted with a result in flight", any(r.retractions for r in requests) and t.state.in_flight)
    assert [r.finish_reason for r in requests] == ["length"] * 3


@scripted(adapter="vllm", pipeline_parallel_size=2, must_reach=["an aborted request is in flight"])
def test_an_abort_between_a_plan_and_its_result(t):
    """The blocks of the aborted request go to others while its result is still under way."""
    a = t.start_req(rid="a", prompt_len=20, max_new_tokens=2)
    b = t.start_req(rid="b", prompt_len=6, prompt_seed=1, max_new_tokens=8)
    yield
    t.abort(a)
    yield
    t.sometimes("an aborted request is in flight", a.status == "aborted" and t.state.in_flight)
    c = t.start_req(rid="c", prompt_len=20, prompt_seed=2, max_new_tokens=2)
    yield from t.run_until_finished(b)
    yield from t.run_until_finished(c)
