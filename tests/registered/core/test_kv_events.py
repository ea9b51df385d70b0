"""KV events: after every step an engine's events match its prefix cache, in the pool and on the host.

Goal: a router that follows them finds the pages that it was told of. Method: prompts that share prefixes, then losses
of pages: evictions, a flush, a host that is too small, a failed copy. The oracle compares a mirror built from the
events with the tree. Origin: vLLM's KV events; Dynamo pull request 12643. Mutants: an-eviction-is-not-told,
a-flush-is-not-told, a-page-is-told-of-another-prefix, a-copy-is-told-before-it-is-there,
a-host-page-goes-without-a-word.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64, kv_events=True)
FOUR_STAGES = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64, kv_events=True)
HOST = EngineConfig(chunked_prefill_size=64, max_total_tokens=512, host_kv_tokens=96, pp_async_depth=1, kv_events=True)
PROMPT_TOKENS = 81
HIT_TOKENS = 80
PAGE = 16


def _ended(t, **asked):
    """Check that a prompt's hit equals the router's knowledge of it."""
    r = t.start_req(max_new_tokens=4, **asked)
    told = t.told_tokens(r.prompt_ids)
    yield from t.run_until_finished(r)
    yield from t.run_until_idle()
    assert r.cached_tokens == told, f"the KV events told {told} tokens, it found {r.cached_tokens}"
    whole = len(r.prompt_ids) // PAGE * PAGE
    assert t.told_tokens(r.prompt_ids) == whole, "the KV events do not tell what is there"
    return r


def _taken_away(t):
    for cached in (0, HIT_TOKENS):
        r = yield from _ended(t, prompt_len=PROMPT_TOKENS)
        assert r.cached_tokens == cached
    branch = yield from _ended(t, prompt_ids=[*r.prompt_ids[:40], *range(1, 42)])
    assert branch.cached_tokens == 32
    assert t.evict(pages=2) == 2
    yield
    for request in (r, branch):
        yield from _ended(t, prompt_ids=request.prompt_ids)
    flush = t.flush_cache()
    yield from t.run_until(lambda: flush.done)
    assert flush.status == 200
    assert not t.told_tokens(r.prompt_ids), "the KV events tell what is gone"
    r = yield from _ended(t, prompt_len=PROMPT_TOKENS)
    assert not r.cached_tokens


@scripted(ONE_STAGE)
def test_what_is_taken_away_is_told(t):
    yield from _taken_away(t)


@scripted(FOUR_STAGES)
def test_what_is_taken_away_is_told_with_four_stages(t):
    yield from _taken_away(t)


@scripted(HOST, must_reach=["the host forgot one"])
def test_what_the_host_keeps_and_forgets_is_told(t):
    for seed in (0, 1, 2, 0, 2):
        r = yield from _ended(t, prompt_len=PROMPT_TOKENS, prompt_seed=seed)
        assert t.evict() > 0
        # The next microbatch carries evicted pages to the host.
        yield
        yield from _ended(t, prompt_len=20, prompt_seed=9)
        assert t.told_tokens(r.prompt_ids) == HIT_TOKENS, "the KV events do not tell what is there"
        stats = t.engine_stats()
        t.sometimes("the host forgot one", stats.host_pages_written > stats.host_pages_total)


@scripted(HOST)
def test_a_copy_that_failed_is_not_told(t):
    r = yield from _ended(t, prompt_len=PROMPT_TOKENS)
    assert t.evict() > 0
    t.fail_next_step(0)
    carrier = t.start_req(prompt_len=20, prompt_seed=9, max_new_tokens=2)
    yield from t.run_until_finished(carrier)
    yield from t.run_until_idle()
    assert carrier.finish_reason == "error"
    assert not t.told_tokens(r.prompt_ids), "the KV events tell what is gone"
    yield from _ended(t, prompt_len=PROMPT_TOKENS)
