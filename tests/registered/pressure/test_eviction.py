"""Eviction beside live requests.

Goal: a prefix that a live request protects survives every eviction; everything else is evicted, least recently used
first, and is computed again. Method: a running request on the older of two cached prefixes; evict everything. Origin:
the eviction tests of SGLang's scripted runtime; B08, B11. Mutants: locked-prefix-is-evicted,
pressure-evicts-everything, thinning-forgets-leaves.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

PAGE = 16
ONE_STAGE = EngineConfig(chunked_prefill_size=64)
TEN_PAGES = EngineConfig(chunked_prefill_size=64, max_total_tokens=10 * PAGE)
WINDOW = "the protected prefix is the least recently used"


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_a_protected_prefix_stays(t):
    r = t.start_req(prompt_len=4 * PAGE, max_new_tokens=12)
    yield from t.advance_to_decode_step(r, 1)
    other = t.start_req(prompt_ids=[60] * (4 * PAGE), max_new_tokens=1)
    yield from t.run_until_finished(other)
    t.sometimes(WINDOW, not r.finished and t.state.kv.cached == 8)
    assert t.evict() == 4
    kept = t.scheduler.memory.tree.match_length(r.prompt_ids)
    assert kept == 4 * PAGE, "a protected prefix was evicted"
    yield from t.run_until_finished(r)


@scripted(ONE_STAGE)
def test_the_least_recently_used_goes_first(t):
    prompts = [[40 + i] * (2 * PAGE) for i in range(3)]
    for prompt in prompts:
        yield from t.warmup_radix(prompt)
    yield from t.warmup_radix(prompts[0])
    assert t.evict(pages=2) == 2
    tree = t.scheduler.memory.tree
    assert [tree.match_length(prompt) for prompt in prompts] == [2 * PAGE, 0, 2 * PAGE]


@scripted(TEN_PAGES, tiers=("sim",))
def test_a_full_cache_makes_room(t):
    requests = [t.start_req(prompt_len=5 * PAGE, prompt_seed=i, max_new_tokens=4) for i in range(5)]
    yield from t.run_until_all_finished(requests)
    assert {r.finish_reason for r in requests} == {"length"}
    assert t.state.kv.cached + t.state.kv.free == 10


@scripted(ONE_STAGE)
def test_a_prefix_that_is_used_often_hides_no_other(t):
    often, seldom = [40] * PAGE, [60] * (2 * PAGE)
    yield from t.warmup_radix(seldom)
    for _ in range(40):
        yield from t.warmup_radix(often)
    assert t.state.kv.cached == 3
    assert t.evict() == 3
    assert t.state.tree.nodes == 0
