"""Rules of a step whose bugs escaped before every step was compared with a specification.

Goal: each of these rules has a script of its own that fails without it. Method: the exact boundary, the second of
four, the state after a retraction. Origin: D09, D10. Mutants: a-registry-grows, a-neighbour-is-skipped,
an-exact-fit-is-no-fit, most-recently-used-goes-first, the-urgent-give-way, a-seed-restarts,
penalties-forget-the-output, the-first-token-never-stops, hits-add-up, a-statistic-drifts, a-digest-without-pages,
a-deadline-met-exactly-is-missed, the-aborted-fill-the-queue, one-token-late.
"""

import pytest
from scripted_lockstep.oracle.digests import check_digests
from thinned import thinned

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import RequestRefused, scripted

register_cpu_ci(est_time=12, suite="base-cpu")
register_cuda_ci(est_time=120, stage="extra-b", runner_config="1-gpu")

PLAIN = EngineConfig(chunked_prefill_size=64, max_total_tokens=1024)
SMALL_PAGES = EngineConfig(page_size=4, chunked_prefill_size=16, max_total_tokens=48)
ONE_ROW = EngineConfig(chunked_prefill_size=64, max_total_tokens=1024, max_running_requests=1, max_queued_requests=2)


@scripted(PLAIN)
def test_an_idle_engine_is_as_small_as_a_new_one(t):
    """Everything reachable from the scheduler is compared at the end of every script."""
    t.smoke()
    rs = [t.start_req(prompt_len=20, prompt_seed=seed, max_new_tokens=3) for seed in range(3)]
    yield from t.run_until_all_finished(rs)


@scripted(PLAIN, must_reach=["all of them decode"])
def test_all_that_can_decode_decode_in_one_microbatch(t):
    rs = [t.start_req(prompt_len=10, prompt_seed=seed, max_new_tokens=6, ignore_eos=True) for seed in range(4)]
    yield from t.run_until(lambda: len(t.state.running) == len(rs))
    for _ in range(3):
        decodes = t.state.in_flight[-1].rids if t.state.in_flight else ()
        t.sometimes("all of them decode", bool(decodes))
        assert not decodes or set(decodes) == {r.rid for r in rs}, f"some did not decode: {decodes}"
        yield
    yield from t.run_until_all_finished(rs)


@scripted(EngineConfig(page_size=4, max_total_tokens=16))
def test_a_prompt_that_fills_all_pages_runs(t):
    r = t.start_req(prompt_len=16, max_new_tokens=1)
    for _ in range(20):
        yield
    assert r.finished, f"{r.rid} did not finish within 20 steps: {t.state}"


@scripted(EngineConfig(page_size=4, chunked_prefill_size=16, max_total_tokens=48))
def test_what_was_not_used_for_longest_is_evicted(t):
    for seed in (0, 1):
        yield from t.run_until_finished(t.start_req(prompt_len=17, prompt_seed=seed, max_new_tokens=1))
    t.evict(4)
    newer = t.start_req(prompt_len=17, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_finished(newer)
    assert newer.cached_tokens == 16, (
        f"the wrong prefix was evicted: {newer.cached_tokens} tokens are left of the newer"
    )


@scripted(SMALL_PAGES, must_reach=["one gave way"])
def test_the_less_urgent_gives_way(t):
    usual = t.start_req(prompt_len=13, max_new_tokens=12, ignore_eos=True)
    urgent = t.start_req(prompt_len=12, prompt_seed=1, max_new_tokens=12, ignore_eos=True, priority=1)
    third = t.start_req(prompt_len=9, prompt_seed=2, max_new_tokens=12, ignore_eos=True, priority=1)
    yield from t.run_until(lambda: any(r.retractions for r in (usual, urgent, third)))
    t.sometimes("one gave way", condition=True)
    assert usual.retractions, "the urgent one gave way to one that is not"
    yield from t.run_until_all_finished([usual, urgent, third])


@scripted(PLAIN, must_reach=["sent back with output"])
def test_sampling_is_the_same_after_a_retraction(t):
    r = t.start_req(prompt_len=20, max_new_tokens=8, ignore_eos=True, temperature=1.0, seed=5, frequency_penalty=0.5)
    yield from t.advance_to_decode_step(r, 3)
    yield from _send_back(t)
    t.sometimes("sent back with output", r.retractions == 1 and len(r.output_ids) >= 3)
    yield from t.run_until_finished(r)
    told = [one.sampling for step in t.history if step.microbatch for one in step.microbatch.segments if one.sampling]
    assert len(told) == 2
    assert told[0] == told[1], f"after its retraction it was told another sampling: {told}"


@pytest.mark.parametrize("place", thinned([1, 2, 3, 4], one_in=3))
@scripted(PLAIN)
def test_a_stop_token_ends_a_request_wherever_it_comes(t, place):
    free = t.start_req(prompt_len=40, max_new_tokens=4, ignore_eos=True)
    yield from t.run_until_finished(free)
    said = list(free.output_ids)
    place = said.index(said[place - 1]) + 1
    r = t.start_req(prompt_len=40, max_new_tokens=6, ignore_eos=True, stop_token_ids=[said[place - 1]])
    yield from t.run_until_finished(r)
    assert r.finish_reason == "stop"
    assert list(r.output_ids) == said[:place]


@scripted(PLAIN, must_reach=["sent back"])
def test_hits_are_told_once(t):
    yield from t.run_until_finished(t.start_req(prompt_len=33, max_new_tokens=1))
    r = t.start_req(prompt_len=40, max_new_tokens=6, ignore_eos=True)
    yield from t.advance_to_decode_step(r, 2)
    before = r.cached_tokens
    yield from _send_back(t)
    t.sometimes("sent back", r.retractions == 1)
    yield from t.run_until_finished(r)
    assert before == 32
    assert r.cached_tokens == before, f"it was told other hits: {r.cached_tokens}, before {before}"


@scripted(PLAIN, must_reach=["sent back"])
def test_a_retraction_counts_no_prompt(t):
    r = t.start_req(prompt_len=40, max_new_tokens=6, ignore_eos=True)
    yield from t.advance_to_decode_step(r, 2)
    yield from _send_back(t)
    t.sometimes("sent back", r.retractions == 1)
    yield from t.run_until_finished(r)
    counted = t.engine_stats().prompt_tokens
    assert counted == 40, f"the prompt was counted again: {counted} tokens"


@scripted(SMALL_PAGES)
def test_digests_stand_for_every_field(t):
    t.smoke()
    rs = [t.start_req(prompt_len=13, prompt_seed=seed, max_new_tokens=16, ignore_eos=True) for seed in range(3)]
    yield from t.run_until_all_finished(rs)
    check_digests(t.history)


@scripted(PLAIN, must_reach=["the deadline is now"])
def test_a_deadline_that_is_met_exactly_is_over(t):
    r = t.start_req(prompt_len=20, max_new_tokens=3, ignore_eos=True)
    t.hold_results()
    yield
    flush = t.flush_cache(timeout_s=1.0)
    yield
    t.clock.advance(1.0)
    t.sometimes("the deadline is now", not flush.done and not t.state.is_quiescent)
    for _ in range(2):
        yield
    assert flush.done, "the call still waits, but it was due"
    assert flush.status == 400
    t.release_results()
    yield from t.run_until_finished(r)


@scripted(ONE_ROW, must_reach=["the queue was full"])
def test_what_was_aborted_leaves_room_in_the_queue(t):
    running = t.start_req(prompt_len=20, max_new_tokens=10, ignore_eos=True)
    yield from t.advance_to_decode_step(running, 1)
    waiting = [t.start_req(prompt_len=20, prompt_seed=seed, max_new_tokens=2) for seed in (1, 2)]
    yield
    t.sometimes("the queue was full", len(t.state.waiting) == 2)
    for r in waiting:
        t.abort(r)
    yield
    try:
        again = t.start_req(prompt_len=20, prompt_seed=3, max_new_tokens=2)
    except RequestRefused as exc:
        raise AssertionError(f"the queue is full of what was aborted: {exc}") from exc
    yield from t.run_until_all_finished([running, again])


def _send_back(t):
    """Retract everything and let it continue."""
    t.pause_generation("retract")
    yield from t.run_until(lambda: not t.state.in_flight)
    yield
    t.continue_generation()


@scripted(SMALL_PAGES, must_reach=["one was sent back after its first tokens"])
@pytest.mark.parametrize(
    "sampling",
    [
        {"presence_penalty": 1.5},
        {"repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "repetition_penalty": 0.8, "temperature": 0.8, "seed": 3, "min_p": 0.05},
        {"logit_bias": {97: 5, 98: -5}, "temperature": 0.8, "seed": 4},
    ],
)
def test_what_sampling_counts_outlives_a_retraction(t, sampling):
    """The oracle compares each output with the same request run alone, which is never retracted."""
    rs = [t.start_req(prompt_len=13, prompt_seed=i, max_new_tokens=16, ignore_eos=True, **sampling) for i in range(3)]
    yield from t.run_until_all_finished(rs)
    t.sometimes("one was sent back after its first tokens", any(r.retractions for r in rs))


@scripted(PLAIN)
def test_a_bias_changes_what_is_said(t):
    plain = t.start_req(prompt_len=20, max_new_tokens=6, ignore_eos=True)
    forced = t.start_req(prompt_len=20, max_new_tokens=6, ignore_eos=True, logit_bias={97: 100})
    yield from t.run_until_all_finished([plain, forced])
    assert forced.output_ids == [97] * 6
    banned = dict.fromkeys(plain.output_ids, -100)
    other = t.start_req(prompt_len=20, max_new_tokens=6, ignore_eos=True, logit_bias=banned)
    yield from t.run_until_finished(other)
    assert not set(other.output_ids) & set(plain.output_ids)
