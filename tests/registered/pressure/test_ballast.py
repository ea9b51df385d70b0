"""A large request that is retracted, and returns.

Goal: under pressure the latest arrival is retracted, the others finish undisturbed, and it recovers with the same
tokens once there is room. Method: a ballast request beside small ones in a pool that shrinks under them. Origin: the
pressure tests of SGLang's scripted runtime; B06, B10. Mutants: victim-is-the-earliest, resume-cuts-the-output.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=4, suite="base-cpu")

PAGE = 16
ONE_STAGE = EngineConfig(chunked_prefill_size=64)
PRIORITY = EngineConfig(chunked_prefill_size=64, schedule_policy="priority", priority_preemption=True)
RETRACTED = "the ballast was retracted while it decoded"


@scripted(ONE_STAGE, must_reach=[RETRACTED])
def test_ballast_is_retracted_and_recovers(t):
    early = [t.start_req(prompt_len=20, prompt_seed=i, max_new_tokens=30) for i in range(2)]
    yield from t.run_until(lambda: len(t.state.running) == 2)
    ballast = t.start_req(prompt_len=6 * PAGE, prompt_seed=7, max_new_tokens=20)
    yield from t.advance_to_decode_step(ballast, 3)
    t.exhaust_kv(leave_pages=0)
    yield from t.run_until(lambda: any(r.retractions for r in (*early, ballast)))
    assert ballast.retractions, "an earlier request gave way"
    t.sometimes(RETRACTED, 3 <= len(ballast.output_ids) < 20)
    assert ballast.status == "waiting"
    yield from t.run_until_all_finished(early)
    assert [r.retractions for r in early] == [0, 0]
    t.release_exhausted()
    yield from t.run_until_finished(ballast)
    assert len(ballast.output_ids) == 20
    assert ballast.client.token_ids == ballast.output_ids


@scripted(PRIORITY, must_reach=[RETRACTED])
def test_a_higher_priority_takes_the_place(t):
    """B17: preemption by priority, with the same tokens afterwards."""
    t.exhaust_kv(leave_pages=9)
    ballast = t.start_req(prompt_len=6 * PAGE, max_new_tokens=20, priority=0)
    yield from t.advance_to_decode_step(ballast, 3)
    urgent = t.start_req(prompt_len=4 * PAGE, prompt_seed=1, max_new_tokens=4, priority=5)
    yield from t.run_until_finished(urgent, max_steps=12)
    t.sometimes(RETRACTED, ballast.retractions == 1 and not ballast.finished)
    yield from t.run_until_finished(ballast)
    assert len(ballast.output_ids) == 20
    assert urgent.retractions == 0
