"""Pages, rows, locks and hits of a request, held and given back.

Goal: each account goes up with a request's life and is exactly back at its end. Method: read the accounts at every step
of single and of prefix-sharing requests. Origin: the core contracts of SGLang's scripted runtime; B04, B05, B11, B13.
Mutants: lock-refs-are-not-released, prefixes-are-never-hit, aborts-count-as-finished, own-tokens-count-as-hits.
"""

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=3, suite="base-cpu")
register_cuda_ci(est_time=30, stage="base-b", runner_config="1-gpu-small")

CHUNK = 64
PAGE = 16
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK, page_size=PAGE)
WINDOW = "two live requests share a prefix"
AGAIN = "a request finds its own first chunk after a retraction"


@scripted(ONE_STAGE)
def test_lock_refs_are_held_and_released(t):
    r = t.start_req(prompt_len=4 * PAGE, max_new_tokens=4)
    yield from t.advance_to_decode_step(r, 1)
    assert r.lock_refs == 1
    assert set(t.get_all_node_lock_refs().values()) == {1}
    assert t.state.tree.locked_nodes == t.state.tree.nodes == 1
    yield from t.run_until_finished(r)
    yield from t.run_until_idle()
    assert set(t.get_all_node_lock_refs().values()) == {0}, "a lock outlived its request"
    assert t.state.tree.locked_nodes == 0
    assert r.lock_refs == 0


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_a_shared_prefix_has_a_lock_for_each(t):
    requests = [t.start_req(prompt_len=4 * PAGE + 2, max_new_tokens=6) for _ in range(2)]
    while not all(r.finished for r in requests):
        yield
        t.sometimes(WINDOW, max(t.get_all_node_lock_refs().values(), default=0) == 2)
    yield from t.run_until_idle()
    assert set(t.get_all_node_lock_refs().values()) == {0}


@scripted(ONE_STAGE)
def test_pages_are_held_and_released(t):
    r = t.start_req(prompt_len=20, max_new_tokens=16)
    yield
    assert r.kv_pages == 2
    assert t.state.kv.held == 2
    assert t.state.rows.free == t.state.rows.total - 1
    yield from t.advance_to_decode_step(r, 14)
    assert r.kv_pages == 3
    yield from t.run_until_finished(r)
    kv = t.state.kv
    assert r.kv_pages == kv.held == 0
    # Prompt and output without the newest token, in full pages.
    assert kv.cached == (20 + 15) // PAGE
    assert kv.free + kv.cached == kv.total
    assert t.state.rows.free == t.state.rows.total


@scripted(ONE_STAGE)
def test_hit_counts_of_prompt_and_decode_nodes(t):
    r = t.start_req(prompt_len=4 * PAGE, max_new_tokens=2 * PAGE + 1)
    yield from t.advance_to_decode_step(r, 1)
    assert list(t.get_all_node_hit_counts().values()) == [1]
    yield from t.run_until_finished(r)
    # The prompt was published when it was confirmed and at the end, the output at the end.
    assert list(t.get_all_node_hit_counts().values()) == [2, 1]
    again = t.start_req(prompt_len=4 * PAGE, max_new_tokens=2 * PAGE + 1)
    yield from t.run_until_finished(again)
    pages = {node.id: len(node.pages) for node in t.scheduler.memory.tree.nodes()}
    hits = t.get_all_node_hit_counts()
    assert sum(pages.values()) == 6
    assert sorted(hits.values()) == [2, 4, 4]
    assert sum(hits[node] * pages[node] for node in hits) == 4 * 4 + 2 * 2


@scripted(ONE_STAGE)
def test_a_warm_prefix_is_used(t):
    prompt = list(range(40, 40 + 5 * PAGE))
    yield from t.warmup_radix(prompt)
    assert t.state.kv.cached == 5
    r = t.start_req(prompt_ids=[*prompt, 33, 34, 35], max_new_tokens=2)
    other = t.start_req(prompt_ids=[*prompt[: 2 * PAGE], *range(60, 60 + PAGE)], max_new_tokens=2)
    yield from t.run_until_all_finished([r, other])
    assert r.cached_tokens == 5 * PAGE
    assert other.cached_tokens == 2 * PAGE


@scripted(ONE_STAGE, must_reach=[AGAIN])
def test_what_a_request_computed_itself_is_no_hit(t):
    """C06: a prompt that is sent once to an empty cache counts no cached tokens, also after a retraction."""
    r = t.start_req(prompt_len=3 * CHUNK - 3, max_new_tokens=2)
    yield from t.advance_to_nth_chunk(r, 1)
    t.pause_generation("retract")
    yield from t.run_until(lambda: r.status == "waiting")
    t.continue_generation()
    yield from t.run_until_finished(r)
    replies = [reply for record in t.history for reply in record.replies if getattr(reply, "rid", None) == r.rid]
    starts = [s.start for record in t.history if record.microbatch for s in record.microbatch.segments if s.sampling]
    t.sometimes(AGAIN, starts == [0, CHUNK])
    told = {reply.cached_tokens for reply in replies} | {r.cached_tokens, t.engine_stats().cached_tokens}
    assert told == {0}, f"its own tokens were counted as hits: {told}"


@scripted(ONE_STAGE)
def test_a_hit_is_as_long_as_what_is_shared(t):
    """B13: in full pages, wherever a prompt leaves the one that is cached, however often its node was split already."""
    prompt = list(range(40, 40 + 6 * PAGE))
    yield from t.warmup_radix(prompt)
    for pages, more in ((3, 0), (5, 3), (1, PAGE - 1), (4, 1), (2, 0), (6, 0), (0, PAGE - 1)):
        shared = pages * PAGE + more
        r = t.start_req(prompt_ids=[*prompt[:shared], *[30 - pages] * (2 * PAGE)], max_new_tokens=1)
        yield from t.run_until_finished(r)
        assert r.cached_tokens == pages * PAGE
        assert max(t.get_all_node_lock_refs().values()) == 0
    again = t.start_req(prompt_ids=[*prompt, 30], max_new_tokens=1)
    yield from t.run_until_finished(again)
    assert again.cached_tokens == 6 * PAGE
    cached = t.state.kv.cached
    assert t.evict() == cached > 0
    assert t.state.kv.free == t.state.kv.total


@scripted(ONE_STAGE)
def test_engine_stats_add_up(t):
    before = t.engine_stats()
    requests = [t.start_req(prompt_len=20, prompt_seed=i, max_new_tokens=4) for i in range(3)]
    yield
    middle = t.engine_stats()
    assert middle.in_flight == 1
    assert middle.pages_free + middle.pages_cached + middle.pages_held == middle.pages_total
    yield from t.run_until_all_finished(requests)
    after = t.engine_stats()
    assert after.requests_started - before.requests_started == 3
    assert after.requests_finished - before.requests_finished == 3
    assert after.prompt_tokens - before.prompt_tokens == 60
    assert after.generated_tokens - before.generated_tokens == 12
    assert after.forward_ct == t.forward_ct
    assert (after.waiting, after.chunked, after.running, after.in_flight) == (0, 0, 0, 0)


@scripted(ONE_STAGE)
def test_totals_are_what_the_clients_saw(t):
    first = t.start_req(prompt_len=2 * PAGE + 8, max_new_tokens=3)
    yield from t.run_until_finished(first)
    again = t.start_req(prompt_ids=first.prompt_ids, max_new_tokens=2)
    gone = t.start_req(prompt_len=20, prompt_seed=1, max_new_tokens=50)
    yield from t.run_until_finished(again)
    t.abort(gone.rid)
    yield from t.run_until_idle()
    requests, stats = [first, again, gone], t.engine_stats()
    assert (stats.requests_started, stats.requests_finished, stats.requests_aborted) == (3, 2, 1)
    assert stats.requests_refused == stats.retractions == stats.weights_version == 0
    assert stats.prompt_tokens == sum(len(r.prompt_ids) for r in requests)
    assert stats.cached_tokens == again.cached_tokens == 2 * PAGE
    assert stats.generated_tokens == sum(len(r.output_ids) for r in requests)
    assert stats.forward_ct == t.forward_ct == sum(record.microbatch is not None for record in t.history)
    assert stats.step == t.state.step
