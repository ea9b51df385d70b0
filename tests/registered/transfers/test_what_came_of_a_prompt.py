"""A receiver continues from the KV that has arrived, once it has arrived, and from nothing else.

Goal: missing KV is computed, received KV is not, the last token always is; a transfer that fails or is late is stopped
and not asked for again, and no stage writes into pages that the request computes with. Method: all of a prompt comes, a
part of it, nothing of it in time; with and without a cached prefix, and with an engine that has nothing else to do;
tokens are counted, and outputs equal a run alone. Origin: SGLang issue 30233, pull request 38961; TensorRT-LLM pull
request 12313; vLLM issue 55181, pull request 53250; local-inference-lab/vllm issue 191; G24. Mutants:
kv-that-did-not-come-is-used, received-counts-from-the-start, the-last-token-is-received,
late-kv-comes-into-pages-in-use, late-only-beside-a-queue, late-is-asked-again, came-in-part-is-asked-again,
a-failure-does-not-wake-the-engine, received-keeps-room-for-the-rest, receiver-freed-twice.
"""

import pytest

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.messages import PagesReceived, PrefillDropped, PrefillWanted
from scripted import scripted

register_cpu_ci(est_time=5, suite="base-cpu")

DECODE = EngineConfig(role="decode", page_size=4, chunked_prefill_size=16, max_total_tokens=256)
PROMPT = list(range(32, 32 + 12))
IN_PART = "a part of the pages has come"
LATE = "the time for the KV is over, and nothing has come"
ALL_LATE = "all of it had come when it was stopped"
ALONE = "nothing else is there"


def _computed(t):
    """Tokens of prompts that this engine has computed."""
    flights = [record.microbatch for record in t.history if record.microbatch is not None]
    return sum(one.tokens for one in flights if one.mode == "prefill")


def _told(t, kind):
    return [reply for record in t.history for reply in record.replies if isinstance(reply, kind)]


def _ended(t):
    return [event for record in t.history for event in record.events if isinstance(event, PagesReceived)]


@pytest.mark.parametrize(("length", "rest"), [(32, 4), (30, 2), (33, 1), (5, 1)])
@scripted(DECODE)
def test_what_came_is_not_computed_and_the_last_token_is(t, length, rest):
    a = t.start_req(prompt_len=length, max_new_tokens=3)
    for _ in range(8):
        yield
    assert a.finish_reason == "length", "a prompt of which all has come does not go on"
    assert _computed(t) == rest


@scripted(DECODE, must_reach=[IN_PART])
def test_what_did_not_come_is_computed(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=4)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.fail_transfer(pages=1)
    yield from t.run_until(lambda: bool(_ended(t)))
    t.sometimes(IN_PART, _ended(t)[0].pages == 1)
    assert a.remaining_prompt_tokens == 30 - 4 - 16, "what did not come is taken for computed"
    assert t.state.kv.held == 1 + 4, "room for what has not come is kept before it is computed"
    yield from t.run_until_finished(a)
    assert _computed(t) == 30 - 4
    assert len(_told(t, PrefillWanted)) == 1


@scripted(DECODE, must_reach=[IN_PART])
def test_what_came_is_counted_after_the_cached_prefix(t):
    yield from t.warmup_radix(PROMPT)
    before = _computed(t)
    t.hold_transfers()
    a = t.start_req(prompt_ids=[*PROMPT, *range(100, 130)], max_new_tokens=4)
    yield from t.run_until(lambda: bool(t.state.transferring))
    wanted = _told(t, PrefillWanted)[-1]
    assert (wanted.first_page, len(wanted.ids)) == (3, 40)
    t.fail_transfer(pages=3)
    yield from t.run_until_finished(a)
    t.sometimes(IN_PART, _ended(t)[-1].pages == 3)
    assert a.cached_tokens == 12
    assert _computed(t) - before == 42 - 12 - 12, "what came is counted without the cached prefix"


@scripted(DECODE, must_reach=[LATE])
def test_late_kv_is_not_waited_for_and_writes_into_no_page_in_use(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=4)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.clock.advance(30.0)
    t.sometimes(LATE, not _ended(t) and not t.state.waiting)
    yield
    assert len(_told(t, PrefillDropped)) == 1, "an engine waits for KV beyond prefill_timeout_s"
    assert not t.state.in_flight, "a stage computes with pages that KV may still come into"
    yield from t.run_until_finished(a)
    assert a.finish_reason == "length"
    assert _computed(t) == 30 - 4 * _ended(t)[0].pages


@scripted(DECODE, must_reach=[ALL_LATE])
def test_an_engine_that_was_late_is_not_asked_again(t):
    first = t.start_req(prompt_len=6, prompt_seed=1, max_new_tokens=1)
    yield from t.run_until_finished(first)
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=4)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.clock.advance(30.0)
    yield from t.run_until(lambda: len(_ended(t)) == 2)
    t.sometimes(ALL_LATE, _ended(t)[1].pages == 7)
    t.pause_generation("retract")
    yield from t.run_until(lambda: a.status == "waiting")
    t.evict()
    t.continue_generation()
    yield
    assert len(_told(t, PrefillWanted)) == 2, "an engine that was late is asked again"
    yield from t.run_until_finished(a)


@scripted(DECODE, must_reach=[IN_PART])
def test_a_prompt_that_came_in_part_is_not_asked_for_again(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=4)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.pause_generation("retract")
    yield from t.run_until(lambda: a.status == "waiting")
    t.sometimes(IN_PART, 0 < _ended(t)[0].pages < 7)
    t.continue_generation()
    yield
    assert len(_told(t, PrefillWanted)) == 1, "a prompt that has come in part is asked for again"
    yield from t.run_until_finished(a)


@pytest.mark.parametrize("pages", [1, None])
@scripted(DECODE, must_reach=[ALONE])
def test_the_end_of_a_transfer_wakes_an_engine_without_work(t, pages):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=2)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.sometimes(ALONE, t.state.queues_clear and not t.state.in_flight)
    if pages is None:
        t.release_transfers()
    else:
        t.fail_transfer(pages=pages)
        yield
    yield
    assert t.state.in_flight, "the transfer is over, and nobody goes on"
    yield from t.run_until_finished(a)


@scripted(DECODE)
def test_a_receiver_that_left_is_freed_once(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=2)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.abort(a)
    yield from t.run_until_idle()
    assert (t.state.kv.held, t.state.rows.free) == (0, t.state.rows.total)
    t.release_transfers()
    both = [t.start_req(prompt_len=30, prompt_seed=seed, max_new_tokens=2) for seed in (1, 2)]
    yield from t.run_until_all_finished(both)
    assert t.state.rows.free == t.state.rows.total
