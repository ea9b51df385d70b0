"""G17: a request is planned early in a step, and retracted late in the same step.

Goal: a victim leaves the plan. Method: one free page; the low priority request is planned first and takes it; the high
priority one needs a page as well, and preempts it. Origin: vLLM issue 23347; B07. Mutant: victim-stays-planned.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

FIVE_PAGES = EngineConfig(chunked_prefill_size=64, max_total_tokens=5 * 16, schedule_policy="priority")
WINDOW = "both need a page and one is free"


@scripted(FIVE_PAGES, must_reach=[WINDOW])
def test_a_victim_leaves_the_plan(t):
    low = t.start_req(prompt_len=32, max_new_tokens=8, priority=0)
    yield
    high = t.start_req(prompt_len=32, prompt_seed=1, max_new_tokens=8, priority=1)
    yield
    assert t.state.running == (low.rid,)
    assert low.kv_pages == high.kv_pages == 2
    t.sometimes(WINDOW, t.state.kv.free == 1)
    yield
    assert t.state.in_flight[0].rids == (high.rid,)
    assert low.status == "waiting"
    assert low.retractions == 1
    yield from t.run_until_all_finished([low, high])
    assert low.finish_reason == high.finish_reason == "length"
    assert high.retractions == 0
