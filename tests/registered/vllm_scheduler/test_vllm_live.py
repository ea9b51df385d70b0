"""The same scripts on vLLM's scheduler alone and on its real server: HTTP front end, busy loop, worker, a tiny model.

Goal: a race of vLLM can be written down in a few lines and happens in the real engine. Method: vLLM's own loop stops at
the gate where it waits anyway; what each client hears is compared with the same request alone. Mutant: none.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None:
    pytest.skip("no vLLM is installed; `make vllm` makes an environment with one", allow_module_level=True)

from scripted import scripted
from scripted.adapters.vllm.config import VllmSettings

register_cpu_ci(est_time=200, suite="vllm-cpu")

# What vLLM's attention on a CPU takes. Two requests that grow past two blocks do not fit.
SETTINGS: Final = VllmSettings(
    block_size=32, num_gpu_blocks=6, max_model_len=128, max_num_batched_tokens=128, max_num_seqs=4
)
TIERS: Final = ("sim", "server")


@scripted(SETTINGS, adapter="vllm", tiers=TIERS, must_reach=["an aborted request is in flight"])
def test_an_abort_between_a_plan_and_its_result(t):
    """The blocks of the aborted request go to others, who say what they say alone."""
    a = t.start_req(rid="a", prompt_len=60, max_new_tokens=20)
    b = t.start_req(rid="b", prompt_len=20, prompt_seed=1, max_new_tokens=8)
    while not b.output_ids:
        yield
    t.sometimes("an aborted request is in flight", "a" in t.last_batch.rids)
    t.abort(a)
    yield
    assert a.status == "aborted"
    c = t.start_req(rid="c", prompt_len=70, prompt_seed=2, max_new_tokens=4)
    yield from t.run_until_finished(b)
    yield from t.run_until_finished(c)
    assert c.finish_reason == "length"


@scripted(SETTINGS, adapter="vllm", tiers=TIERS)
def test_a_flush_in_flight(t):
    """It is refused while a block is in use; by force it takes what is in flight back, and nothing is said twice."""
    a = t.start_req(prompt_len=40, max_new_tokens=6)
    while len(a.output_ids) < 2:
        yield
    refused = t.flush_cache()
    yield
    assert refused.status == 400
    forced = t.flush_cache(force=True)
    yield from t.run_until_finished(a)
    assert forced.status == 200
    assert a.finish_reason == "length"


@scripted(SETTINGS, adapter="vllm", tiers=TIERS)
def test_a_pause_keeps_what_runs(t):
    """Nothing is launched until it ends, whatever arrives in between."""
    a = t.start_req(prompt_len=40, max_new_tokens=6)
    while len(a.output_ids) < 2:
        yield
    t.pause_generation("keep")
    yield
    said = len(a.output_ids)
    b = t.start_req(prompt_len=10, prompt_seed=1, max_new_tokens=2)
    yield
    yield
    assert len(a.output_ids) == said
    assert not b.output_ids
    t.continue_generation()
    yield from t.run_until_finished(a)
    yield from t.run_until_finished(b)


@scripted(SETTINGS, adapter="vllm", tiers=TIERS, must_reach=["a request was preempted"])
def test_a_preemption(t):
    """Requests that do not fit together take turns, and each says what it says alone."""
    requests = [t.start_req(prompt_len=60, prompt_seed=seed, max_new_tokens=40) for seed in range(2)]
    while not all(r.finished for r in requests):
        yield
        t.sometimes("a request was preempted", any(r.retractions for r in requests))
    assert [r.finish_reason for r in requests] == ["length"] * 2


@scripted(SETTINGS, adapter="vllm", tiers=TIERS)
def test_a_prefix_hit_until_the_flush(t):
    """An equal prompt finds the first one's block, also while its result is held back; after a flush it does not."""
    a = t.start_req(prompt_len=40, max_new_tokens=3)
    yield from t.run_until_finished(a)
    b = t.start_req(prompt_len=40, max_new_tokens=3)
    yield from t.run_until_finished(b)
    assert (a.cached_tokens, b.cached_tokens) == (0, 32)
    flush = t.flush_cache()
    yield
    c = t.start_req(prompt_len=40, max_new_tokens=3)
    t.hold_results()
    yield
    yield
    assert not c.output_ids
    t.release_results()
    yield from t.run_until_finished(c)
    assert (flush.status, c.cached_tokens) == (200, 0)
    assert c.output_ids == a.output_ids
