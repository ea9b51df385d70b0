"""The same scripts on another engine's scheduler alone and on its real server: front end, loop, tiny model.

Goal: a few lines describe a race of vLLM or SGLang, the same for both, and it happens in the real engine. Method: the
engine's own loop stops at the gate where it waits anyway; each client's output is compared with a run alone. Mutant:
none.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

import pytest

from ci.register import register_cpu_ci

if find_spec("vllm") is None and find_spec("sglang") is None:
    pytest.skip("neither vLLM nor SGLang is installed; `make vllm` and `make sglang` do it", allow_module_level=True)

from scripted import scripted

register_cpu_ci(est_time=200, suite="vllm-cpu")
register_cpu_ci(est_time=200, suite="sglang-cpu")

# SGLang and its imports emit warnings.
pytestmark = pytest.mark.filterwarnings("default")

ADAPTER: Final = "sglang" if find_spec("vllm") is None else "vllm"
# Five blocks, of the size that vLLM's attention on a CPU needs: too few for three requests that grow to three blocks.
SETTINGS: Final = {
    "vllm": {
        "block_size": 32,
        "num_gpu_blocks": 6,
        "max_model_len": 128,
        "max_num_batched_tokens": 128,
        "max_num_seqs": 4,
    },
    "sglang": {
        "page_size": 32,
        "max_total_tokens": 160,
        "context_length": 128,
        "chunked_prefill_size": 128,
        # SGLang admits more than fits, so that it retracts.
        "schedule_conservativeness": 0.1,
    },
}
# A pause that keeps running requests.
KEEP: Final = {"vllm": "keep", "sglang": "in_place"}
on_both = scripted(adapter=ADAPTER, tiers=("sim", "server"), **SETTINGS[ADAPTER])


@on_both
def test_an_abort_between_a_plan_and_its_result(t):
    """The blocks of the aborted request go to others, whose output equals a run alone."""
    a = t.start_req(rid="a", prompt_len=60, max_new_tokens=20)
    b = t.start_req(rid="b", prompt_len=20, prompt_seed=1, max_new_tokens=8)
    while not b.output_ids:
        yield
    assert "a" in t.last_batch.rids
    t.abort(a)
    while not a.finished:
        yield
    assert a.status == "aborted"
    c = t.start_req(rid="c", prompt_len=70, prompt_seed=2, max_new_tokens=4)
    yield from t.run_until_finished(b)
    yield from t.run_until_finished(c)
    assert c.finish_reason == "length"


@on_both
def test_a_flush_in_flight(t):
    """It is refused while a block is in use, also between a plan and its result, and no token is sent twice."""
    yield from _flush_in_flight(t)


if ADAPTER == "sglang":

    @scripted(adapter=ADAPTER, tiers=("sim", "server"), disable_overlap_schedule=True, **SETTINGS[ADAPTER])
    def test_a_flush_in_flight_of_the_normal_loop(t):
        """The same on SGLang's other loop, which waits for each result before it plans again."""
        yield from _flush_in_flight(t)


def _flush_in_flight(t):
    a = t.start_req(prompt_len=40, max_new_tokens=6)
    while len(a.output_ids) < 2:
        yield
    assert t.state.in_flight
    refused = t.flush_cache()
    yield from t.run_until_finished(a)
    while t.state.in_flight:
        yield
    done = t.flush_cache()
    yield
    yield
    assert (refused.status, done.status) == (400, 200)
    assert a.finish_reason == "length"


@on_both
def test_a_pause_keeps_what_runs(t):
    """Nothing is launched until the pause ends, regardless of arrivals."""
    a = t.start_req(prompt_len=40, max_new_tokens=8)
    while len(a.output_ids) < 2:
        yield
    t.pause_generation(KEEP[ADAPTER])
    yield
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


@on_both
def test_a_retraction_for_want_of_memory(t):
    """Requests that do not fit together take turns, and each output equals a run alone."""
    requests = [t.start_req(prompt_len=20, prompt_seed=seed, max_new_tokens=50) for seed in range(3)]
    while not all(r.finished for r in requests):
        yield
    assert any(r.retractions for r in requests)
    assert [r.finish_reason for r in requests] == ["length"] * 3


@scripted(adapter=ADAPTER, tiers=("server",), **SETTINGS[ADAPTER])
def test_other_weights_in_the_window(t):
    """Between a plan and its result: later tokens are computed with the new weights, over KV of the old ones."""
    a = t.start_req(prompt_len=40, max_new_tokens=12)
    while len(a.output_ids) < 3:
        yield
    t.pause_generation(KEEP[ADAPTER])
    yield
    t.update_weights(1)
    yield
    t.continue_generation()
    b = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=6)
    yield from t.run_until_finished(a)
    yield from t.run_until_finished(b)
    assert (a.finish_reason, b.finish_reason) == ("length", "length")


@on_both
def test_a_prefix_hit_until_the_flush(t):
    """An equal prompt finds the first one's block, also while its result is held back; after a flush it does not."""
    a = t.start_req(prompt_len=40, max_new_tokens=3)
    yield from t.run_until_finished(a)
    b = t.start_req(prompt_len=40, max_new_tokens=3)
    yield from t.run_until_finished(b)
    assert (a.cached_tokens, b.cached_tokens) == (0, 32)
    while t.state.in_flight:
        yield
    flush = t.flush_cache()
    yield
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
