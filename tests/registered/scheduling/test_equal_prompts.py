"""Equal prompts that arrive together: one is computed, the others wait for its result and hit it.

Goal: at every depth a prompt is computed once; if it fails, is aborted or is retracted, another is computed in its
place at once. Method: the tokens that a stage has computed; aborts, failures, pauses and a deferred flush while one
request waits for another. Origin: four equal prompts of 2,048 tokens computed 4,128, and eight of 100 all 800.
Mutants: equal-prompts-are-computed-again, waits-for-the-aborted, waits-for-those-sent-back, a-failed-prompt-is-hit,
flush-keeps-what-one-waits-for, one-that-waits-keeps-others-out, waits-for-another-lora, waits-for-a-few-tokens,
a-burst-of-short-ones-is-computed-again.
"""

import pytest
from thinned import thinned

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=12, suite="base-cpu")

TWO_STAGES = EngineConfig(pp_size=2)
FOUR_STAGES = EngineConfig(pp_size=4, kv_sanitizer=True)
AHEAD = EngineConfig(async_scheduling=True, chunked_prefill_size=2048)
WHOLE = EngineConfig(pp_size=2, chunked_prefill_size=2048, max_loras=1)
WAITS = "one request waits for another, which is in flight"


BURSTS = [EngineConfig(pp_async_depth=depth - 1) for depth in (2, 4, 6)]


def _start_two(t, tokens=1200, **second):
    """Start two: the first one's prompt is in flight, and the second waits for it although a slot is free."""
    first = t.start_req(prompt_len=tokens, max_new_tokens=4)
    other = t.start_req(prompt_len=tokens, max_new_tokens=4, **second)
    yield
    yield
    in_flight = [batch.rids for batch in t.state.in_flight]
    t.sometimes(WAITS, in_flight == [(first.rid,)] and t.state.waiting == (other.rid,))
    return first, other


def _computed(t):
    """Return the prompt tokens that a stage has computed: all but one token a decode."""
    prompts = [one for record in t.history if record.microbatch for one in record.microbatch.segments if one.sampling]
    return t.stage(0).tokens, [one.start for one in prompts]


def _is_launched(t, r):
    return any(r.rid in batch.rids for batch in t.state.in_flight)


def _four_at_once(t):
    four = [t.start_req(prompt_len=2048, max_new_tokens=1) for _ in range(4)]
    while not all(r.finished for r in four):
        t.sometimes(WAITS, t.state.chunked is None and t.state.in_flight and len(t.state.waiting) == 3)
        yield
    yield from t.run_until_idle()
    computed, begins = _computed(t)
    assert computed == 2048 + 3 * 16, f"{computed} tokens were computed for four times the same 2,048"
    assert begins == [0, 2032, 2032, 2032]
    assert [r.cached_tokens for r in four] == begins


@scripted(EngineConfig())
def test_four_at_once_on_one_stage(t):
    four = [t.start_req(prompt_len=2048, max_new_tokens=1) for _ in range(4)]
    yield from t.run_until_all_finished(four)
    assert _computed(t) == (2048 + 3 * 16, [0, 2032, 2032, 2032])


@scripted(EngineConfig(pp_async_depth=1))
def test_a_burst_of_short_ones_is_computed_once(t):
    yield from _eight_at_once(t)


@pytest.mark.parametrize("script", thinned(["_eight_at_once", "_eight_in_turn"], one_in=2))
@pytest.mark.parametrize("config", BURSTS, ids=["depth 2", "depth 4", "depth 6"])
def test_a_burst_at_any_depth(harness, config, script):
    with harness(config) as engine:
        engine.run(globals()[script])


def _eight_at_once(t):
    yield from _end_of_a_burst(t, [t.start_req(prompt_len=100, max_new_tokens=1) for _ in range(8)])


def _eight_in_turn(t):
    eight = []
    for _ in range(8):
        eight.append(t.start_req(prompt_len=100, max_new_tokens=1))
        yield
    yield from _end_of_a_burst(t, eight)


def _end_of_a_burst(t, eight):
    yield from t.run_until_all_finished(eight)
    computed, begins = _computed(t)
    assert computed == 100 + 7 * 4, f"{computed} tokens were computed for eight times the same 100"
    assert begins == [0, *[96] * 7]


@scripted(TWO_STAGES, must_reach=[WAITS])
def test_four_at_once_on_two_stages(t):
    yield from _four_at_once(t)


@scripted(FOUR_STAGES, must_reach=[WAITS])
def test_four_at_once_on_four_stages(t):
    yield from _four_at_once(t)


@scripted(AHEAD, must_reach=[WAITS])
def test_four_at_once_planned_ahead(t):
    yield from _four_at_once(t)


@scripted(EngineConfig(pp_size=2, model="embedded-window"), must_reach=[WAITS])
def test_four_at_once_with_window_layers(t):
    yield from _four_at_once(t)


@scripted(EngineConfig(pp_size=2, host_kv_tokens=4096, schedule_policy="lpm"), must_reach=[WAITS])
def test_four_at_once_with_a_second_tier(t):
    yield from _four_at_once(t)


@scripted(EngineConfig(max_prefill_tokens=4096, chunked_prefill_size=-1), must_reach=[WAITS])
def test_not_in_one_microbatch_either(t):
    """There is room for both in the first microbatch of one stage."""
    both = [t.start_req(prompt_len=1000, max_new_tokens=2) for _ in range(2)]
    yield
    t.sometimes(WAITS, [batch.rids for batch in t.state.in_flight] == [(both[0].rid,)])
    yield from t.run_until_all_finished(both)
    assert [r.cached_tokens for r in both] == [0, 992], "both were computed"


@scripted(WHOLE, must_reach=[WAITS])
def test_an_aborted_prompt_is_not_waited_for(t):
    first, other = yield from _start_two(t)
    t.hold_results()
    t.abort(first)
    yield
    assert _is_launched(t, other), f"{other.rid} waits for a prompt that will not be published"
    t.release_results()
    yield from t.run_until_finished(other)
    assert (other.cached_tokens, other.finish_reason, len(other.output_ids)) == (0, "length", 4)


@scripted(WHOLE, must_reach=[WAITS])
def test_a_failed_prompt_leaves_the_other_whole(t):
    t.fail_next_step(1)
    first, other = yield from _start_two(t)
    yield from t.run_until_finished(first)
    assert first.finish_reason == "error"
    assert _is_launched(t, other)
    yield from t.run_until_finished(other)
    assert other.cached_tokens == 0, "it has hit what was never written"
    assert (other.finish_reason, len(other.output_ids)) == ("length", 4)


@scripted(WHOLE, must_reach=[WAITS])
def test_a_prompt_that_is_sent_back_waits_for_the_other(t):
    """The first is still in flight when the second begins; then it hits the pages that the second computes."""
    first, other = yield from _start_two(t)
    t.hold_results()
    t.pause_generation("retract")
    t.continue_generation()
    yield
    assert _is_launched(t, other), f"{other.rid} waits for a prompt that is sent back"
    t.release_results()
    yield from t.run_until_all_finished([first, other])
    assert (first.retractions, first.cached_tokens, other.cached_tokens) == (1, 0, 0)
    _, begins = _computed(t)
    assert begins == [0, 0, 1200]


@scripted(WHOLE, must_reach=[WAITS])
def test_a_flush_comes_between_the_two(t):
    """The flush takes effect in the step in which the first request ends; the other hits nothing older."""
    first = t.start_req(prompt_len=1200, max_new_tokens=1)
    other = t.start_req(prompt_len=1200, max_new_tokens=4)
    yield
    flush = t.flush_cache(timeout_s=60)
    yield
    t.sometimes(WAITS, not flush.done and t.state.waiting == (other.rid,))
    yield from t.run_until_all_finished([first, other])
    assert (flush.status, other.cached_tokens, len(other.output_ids)) == (200, 0, 4), "the cache outlived its flush"


@scripted(WHOLE, must_reach=[WAITS])
def test_the_one_that_waits_keeps_no_other_out(t):
    t.start_req(prompt_len=1200, max_new_tokens=4)
    waits = t.start_req(prompt_len=1200, max_new_tokens=4)
    others = [t.start_req(prompt_len=1200, prompt_seed=1), t.start_req(prompt_len=40)]
    yield
    yield
    t.sometimes(WAITS, t.state.waiting and t.state.waiting[0] == waits.rid)
    assert _is_launched(t, others[0]), f"{waits.rid} keeps out what has nothing to wait for"
    yield from t.run_until_all_finished([waits, *others])
    assert (waits.cached_tokens, others[0].cached_tokens) == (1184, 0)


@pytest.mark.parametrize("case", ["less than half", "a few tokens", "its logprobs"])
@scripted(WHOLE)
def test_what_spares_little_is_not_waited_for(t, case):
    prompt = list(range(32, 132)) * 15
    begin, more = {"a few tokens": (48, 1), "less than half": (600, 700), "its logprobs": (1200, 1)}[case]
    first = t.start_req(prompt_ids=[*prompt[:begin], 200], max_new_tokens=2)
    asked = {"return_logprob": True, "logprob_start_len": 0} if case == "its logprobs" else {}
    other = t.start_req(prompt_ids=[*prompt[:begin], *([201] * more)], max_new_tokens=2, **asked)
    yield
    yield
    assert _is_launched(t, other), f"{other.rid} waits, but would be spared little"
    yield from t.run_until_all_finished([first, other])
    assert other.cached_tokens == 0


@scripted(WHOLE, must_reach=[WAITS])
def test_a_prompt_of_another_lora_is_not_waited_for(t):
    load = t.load_lora("a", "embedded-lora:1")
    yield from t.run_until(lambda: load.done)
    adapted = t.start_req(prompt_len=1200, max_new_tokens=4, lora="a")
    plain, waits = (t.start_req(prompt_len=1200, max_new_tokens=4, lora=lora) for lora in (None, "a"))
    yield
    yield
    t.sometimes(WAITS, t.state.waiting == (waits.rid,))
    assert _is_launched(t, plain), f"{plain.rid} waits for KV of a LoRA that it does not have"
    yield from t.run_until_all_finished([adapted, plain, waits])
    assert (plain.cached_tokens, waits.cached_tokens) == (0, 1184)
