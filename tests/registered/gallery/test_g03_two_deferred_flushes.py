"""G03: a second deferred flush while the first one waits.

Goal: the second is refused with a message and the first is answered once, at idle or at its deadline. Method: two
flushes with a timeout while a request runs; virtual time for the deadline. Origin: SGLang pull requests 21413 and
21490. Mutants: deferred-flush-has-no-deadline, second-deferred-flush-replaces-the-first.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

ONE_STAGE = EngineConfig(chunked_prefill_size=64)
WINDOW = "a flush waits for a running request"


@scripted(ONE_STAGE, must_reach=[WINDOW])
def test_second_deferred_flush_is_refused(t):
    a = t.start_req(prompt_len=40, max_new_tokens=6)
    yield from t.advance_to_decode_step(a, 1)
    first = t.flush_cache(timeout_s=60)
    yield
    t.sometimes(WINDOW, not first.done and not a.finished)
    second = t.flush_cache(timeout_s=60)
    yield
    assert second.done, "the second deferred flush was not refused"
    assert not first.done
    assert second.status == 400
    assert "another flush waits" in second.text
    yield from t.run_until(lambda: first.done)
    assert a.finished
    assert first.status == 200
    assert t.state.kv.free == t.state.kv.total


@scripted(ONE_STAGE)
def test_a_deferred_flush_gives_up_at_its_deadline(t):
    a = t.start_req(prompt_len=40, max_new_tokens=20)
    yield from t.advance_to_decode_step(a, 1)
    flush = t.flush_cache(timeout_s=5)
    t.clock.advance(4.9)
    yield
    t.clock.advance(4.9)
    yield
    assert not flush.done
    t.clock.advance(0.2)
    yield
    assert flush.done, "the flush waits beyond its deadline"
    assert flush.status == 400
    assert "still busy after 5.0 s" in flush.text
    assert "running=1" in flush.text
    after = t.flush_cache(timeout_s=5)
    yield from t.run_until_finished(a)
    yield from t.run_until(lambda: after.done)
    assert after.status == 200
