"""Scripts on this engine's own scheduler as an outsider would adapt it: pauses, batches that fail, priorities.

Goal: the verbs that the example scheduler does not declare, and the gallery's bugs seen with the checks that hold for
every scheduler. Method: two stages, small pools. Origin: docs/your_scheduler.md. Mutants: flush-ignores-in-flight,
pause-does-not-stop-launches, token-after-the-end, decode-runs-twice, priority-is-upside-down.
"""

from ci.register import register_cpu_ci
from scripted import scripted

register_cpu_ci(est_time=2, suite="base-cpu")

OUTSIDE = "examples/lockstep/outside.py"
WINDOW = "all of the prompt is launched, and no token is there"
OVERTAKEN = "an urgent request computes first"


@scripted(adapter=OUTSIDE, must_reach=[WINDOW])
def test_a_flush_between_the_last_chunk_and_its_result_is_refused(t):
    r = t.start_req(prompt_len=30, max_new_tokens=2)
    yield from t.run_until(lambda: r.computed == 30)
    t.sometimes(WINDOW, t.state.in_flight and not r.output_ids)
    flush = t.flush_cache()
    yield from t.run_until_finished(r)
    assert flush.status == 400
    assert "in_flight" in flush.text


@scripted(adapter=OUTSIDE)
def test_a_pause_lasts_until_it_is_ended(t):
    r = t.start_req(prompt_len=10, max_new_tokens=6)
    yield from t.run_until(lambda: r.output_ids)
    pause = t.pause_generation("retract")
    yield from t.run_until(lambda: pause.done)
    assert pause.status == 200
    assert t.state.paused == "retract"
    for _ in range(5):
        yield
        assert t.last_batch is None
    assert r.status == "waiting"
    go = t.continue_generation()
    yield from t.run_until_finished(r)
    assert go.status == 200
    assert t.state.paused is None
    assert r.retractions == 1


@scripted(adapter=OUTSIDE)
def test_a_pause_may_end_what_is_alive(t):
    r = t.start_req(prompt_len=10, max_new_tokens=6)
    yield
    t.pause_generation("abort")
    yield from t.run_until_finished(r)
    assert r.status == "aborted"
    later = t.start_req(prompt_len=10, max_new_tokens=2)
    t.continue_generation()
    yield from t.run_until_finished(later)
    assert later.finish_reason == "length"


@scripted(adapter=OUTSIDE)
def test_a_batch_that_fails_ends_its_own_requests(t):
    a = t.start_req(rid="a", prompt_len=10, max_new_tokens=2)
    t.fail_next_step(0)
    yield
    b = t.start_req(rid="b", prompt_len=10, prompt_seed=1, max_new_tokens=2)
    yield from t.run_until_all_finished([a, b])
    assert (a.finish_reason, b.finish_reason) == ("error", "length")


@scripted(adapter=OUTSIDE, max_running_requests=1, must_reach=[OVERTAKEN])
def test_an_urgent_request_goes_first(t):
    first = t.start_req(rid="first", prompt_len=10, max_new_tokens=4)
    yield
    usual = t.start_req(rid="usual", prompt_len=10, prompt_seed=1, max_new_tokens=1)
    urgent = t.start_req(rid="urgent", prompt_len=10, prompt_seed=2, max_new_tokens=1, priority=2)
    yield from t.run_until_finished(urgent)
    t.sometimes(OVERTAKEN, not usual.finished)
    yield from t.run_until_all_finished([first, usual])
