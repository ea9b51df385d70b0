"""Flush, weight update and sleep wait for transfers on both sides, and no KV goes between engines of other weights.

Goal: an engine whose pages are written or read by transfers is not quiescent, and says so; the stages do not sleep over
a transfer; a prompt is neither asked for nor delivered under the weights from before an update. Method: the calls while
KV is held in transit, after its arrival in a pause, and while it is sent; an update between a request and its step.
Origin: SGLang pull requests 9865, 18646 and 36150; vLLM pull requests 41180 and 42695, issue 44483. Mutants:
flush-overlooks-kv-that-came, flush-overlooks-what-is-sent, update-overlooks-what-is-sent, sleep-overlooks-transfers,
busy-with-nothing, kv-of-other-weights, wanted-with-the-weights-of-before.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from engine.core.messages import PrefillWanted
from engine.core.plan import StopTransfer
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

SIZES = {"page_size": 4, "chunked_prefill_size": 16, "max_total_tokens": 256}
DECODE = EngineConfig(role="decode", **SIZES)
PREFILL = EngineConfig(role="prefill", **SIZES)
OTHER = "embedded:7"
CAME = "the KV has come, and generation is paused"
SENDS = "all is computed, and three transfers are open"
ON_ITS_WAY = "KV is on its way"
BETWEEN = "the weights changed between the request and its step"


def _done(t, call):
    yield from t.run_until(lambda: call.done)
    return call


def _delivers(t):
    t.hold_transfers()
    a = t.prefill(prompt_len=40)
    yield from t.run_until(lambda: t.state.transferring == [a.rid])
    t.sometimes(SENDS, t.scheduler.books.open_transfers == 3 and not t.state.in_flight)
    return a


@scripted(DECODE, must_reach=[CAME])
def test_a_flush_sees_kv_that_has_come(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=4)
    yield from t.run_until(lambda: bool(t.state.transferring))
    t.pause_generation("in_place")
    t.release_transfers()
    yield
    yield
    t.sometimes(CAME, not t.scheduler.books.open_transfers and t.state.transferring == [a.rid])
    flush = yield from _done(t, t.flush_cache())
    assert flush.status == 400, "a flush takes the pages of KV that has come"
    assert "transferring=1" in flush.text, "an engine is busy and does not say with what"
    t.continue_generation()
    yield from t.run_until_finished(a)


@scripted(PREFILL, must_reach=[SENDS])
def test_a_flush_sees_what_is_sent(t):
    a = yield from _delivers(t)
    flush = yield from _done(t, t.flush_cache())
    assert flush.status == 400, "a flush takes pages that are being sent"
    assert "transferring=1" in flush.text
    t.release_transfers()
    yield from t.run_until_finished(a)
    assert (yield from _done(t, t.flush_cache())).status == 200


@scripted(PREFILL, must_reach=[SENDS])
def test_an_update_waits_for_what_is_sent(t):
    a = yield from _delivers(t)
    update = t.update_weights(OTHER, timeout_s=5.0)
    for _ in range(3):
        yield
    assert not update.done, "the weights change while KV of the old ones is sent"
    t.release_transfers()
    yield from _done(t, update)
    assert (update.status, a.finish_reason) == (200, "length")


@scripted(DECODE, must_reach=[ON_ITS_WAY])
def test_a_sleep_waits_for_transfers(t):
    t.hold_transfers()
    a = t.start_req(prompt_len=30, max_new_tokens=4)
    yield from t.run_until(lambda: bool(t.state.transferring))
    sleep = t.sleep()
    yield
    t.sometimes(ON_ITS_WAY, any(isinstance(one, StopTransfer) for one in t.history[-1].transfers))
    assert not t.state.in_flight, "the stages are told to sleep while KV comes into their pages"
    yield from _done(t, sleep)
    yield from _done(t, t.wake())
    t.release_transfers()
    yield from t.run_until_finished(a)
    assert a.retractions == 1


@scripted(PREFILL, must_reach=[BETWEEN])
def test_no_kv_of_other_weights_is_delivered(t):
    update = t.update_weights(OTHER)
    yield
    a = t.prefill(prompt_len=40)
    wanted = a.message.deliver.weights
    yield
    t.sometimes(BETWEEN, wanted != t.scheduler.books.weights)
    for _ in range(6):
        yield
    assert update.status == 200
    assert a.finish_reason == "error", "KV is delivered that other weights have computed"
    assert OTHER in a.error


@scripted(DECODE)
def test_prompts_are_asked_for_under_the_weights_of_now(t):
    update = yield from _done(t, t.update_weights(OTHER))
    assert update.status == 200
    a = t.start_req(prompt_len=30, max_new_tokens=2)
    yield from t.run_until_finished(a)
    (wanted,) = [one for record in t.history for one in record.replies if isinstance(one, PrefillWanted)]
    assert wanted.weights == OTHER, "a prompt is asked for under the weights of before"
