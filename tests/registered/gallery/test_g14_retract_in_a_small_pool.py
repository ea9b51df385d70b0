"""G14: six requests decode in a pool that has room for three.

Goal: requests that give way free their pages before the others take them, and all finish with the same tokens as
alone. Method: eight pages, six requests that grow to three pages each, on one stage and with microbatches in flight.
Origin: SGLang issue 14972; B06. Mutant: retraction-frees-too-late.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

SMALL_POOL = EngineConfig(chunked_prefill_size=64, max_total_tokens=8 * 16)
SMALL_POOL_PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64, max_total_tokens=8 * 16)
WINDOW = "a request was retracted"


@scripted(SMALL_POOL, tiers=("sim",), must_reach=[WINDOW])
def test_six_requests_in_a_pool_for_three(t):
    yield from _run_six(t)


@scripted(SMALL_POOL_PP4, must_reach=[WINDOW])
def test_six_requests_in_flight_in_a_pool_for_three(t):
    yield from _run_six(t)


def _run_six(t):
    requests = [t.start_req(prompt_len=20, prompt_seed=i, max_new_tokens=24) for i in range(6)]
    while not all(r.finished for r in requests):
        yield
        t.sometimes(WINDOW, any(r.retractions for r in requests))
    assert {r.finish_reason for r in requests} == {"length"}
    assert all(len(r.output_ids) == 24 for r in requests)
    assert t.state.kv.held == 0
