"""Equal scripts have equal digests, and different scripts different ones.

Goal: the same events in the same steps give the same plans, replies and state, bit for bit; one event moved by one step
gives others. Method: ten runs on one engine, a run with the flush a step later, and the plans of both tiers against
each other. Origin: D10 and the determinism contract. Mutant: none; each test also shows that a moved event changes the
digest.
"""

from ci.register import register_cpu_ci
from engine import EngineConfig
from scripted import ScriptedSim

register_cpu_ci(est_time=8, suite="base-cpu")

RUNS = 10
CONFIG = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=64)


def flush_beside_two_requests(t, flush_at_step):
    a = t.start_req(prompt_len=150, max_new_tokens=4)
    b = t.start_req(prompt_len=40, prompt_seed=1, max_new_tokens=6, temperature=1.0)
    yield from t.run_until(lambda: t.state.step == flush_at_step)
    t.flush_cache()
    yield from t.run_until_all_finished([a, b])


def test_ten_runs_have_one_digest(harness):
    with harness(CONFIG) as engine:
        results = [engine.run(flush_beside_two_requests, 3) for _ in range(RUNS)]
    assert len({result.digest for result in results}) == 1
    assert len({result.steps for result in results}) == 1


def test_one_event_moved_gives_another_digest(harness):
    with harness(CONFIG) as engine:
        before = engine.run(flush_beside_two_requests, 3)
        after = engine.run(flush_beside_two_requests, 4)
    assert before.digest != after.digest


def test_both_tiers_take_the_same_plans(harness):
    with harness(CONFIG) as engine:
        plans = engine.run(flush_beside_two_requests, 3).plan_digest
    with ScriptedSim.start(CONFIG) as sim:
        assert sim.run(flush_beside_two_requests, 3).plan_digest == plans
