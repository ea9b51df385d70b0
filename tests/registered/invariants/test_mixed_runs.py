"""Long mixed runs with everything at once.

Goal: for every mix and order of events the books balance after every step, every client gets one end, and every request
that reached its end has the output of a run alone. Method: seeded random verbs over several configurations: requests,
aborts, disconnects, pauses, flushes, pressure, eviction, held results, failing steps. Origin: D09, D10. Mutants:
abort-ignores-in-flight, retraction-frees-too-late, retraction-ignores-in-flight, resume-cuts-the-output,
victim-stays-planned, decode-runs-twice, deferred-request-keeps-its-lock, locked-prefix-is-evicted.
"""

import random

import pytest

from ci.register import register_cpu_ci, register_cuda_ci
from engine import EngineConfig
from scripted import scripted

register_cpu_ci(est_time=8, suite="base-cpu")
register_cuda_ci(est_time=90, stage="extra-b", runner_config="4-gpu")

CHUNK = 64
STEPS = 300
ONE_STAGE = EngineConfig(chunked_prefill_size=CHUNK, max_total_tokens=60 * 16, max_running_requests=6)
MIXED = EngineConfig(
    chunked_prefill_size=CHUNK, max_total_tokens=60 * 16, mixed_chunk=True, schedule_policy="lpm", page_size=4
)
PP4 = EngineConfig(pp_size=4, pp_async_depth=2, chunked_prefill_size=CHUNK, max_total_tokens=60 * 16)
PRIORITY = EngineConfig(
    pp_size=2,
    pp_async_depth=1,
    chunked_prefill_size=CHUNK,
    max_total_tokens=40 * 16,
    schedule_policy="priority",
    priority_preemption=True,
)
SEEDS = range(5)


@pytest.mark.parametrize("seed", SEEDS)
@scripted(ONE_STAGE, tiers=("sim",))
def test_one_stage_and_few_rows(t, seed):
    yield from _mix(t, seed)


@pytest.mark.parametrize("seed", SEEDS)
@scripted(MIXED, tiers=("sim",))
def test_mixed_chunks_and_small_pages(t, seed):
    yield from _mix(t, seed)


@pytest.mark.parametrize("seed", SEEDS)
@scripted(PP4, tiers=("sim",))
def test_four_stages(t, seed):
    yield from _mix(t, seed)


@pytest.mark.parametrize("seed", SEEDS)
@scripted(PRIORITY, tiers=("sim",))
def test_priorities_with_preemption(t, seed):
    yield from _mix(t, seed)


@scripted(PP4, tiers=("server",))
def test_four_stages_on_processes(t):
    yield from _mix(t, seed=100, steps=120)


def _mix(t, seed, steps=STEPS):
    """Step with an occasional random event; then release everything, which must come to an end."""
    choice = random.Random(seed)
    requests = []
    while t.state.step < steps:
        if choice.random() < 0.4:
            _do_something(t, choice, requests)
        yield
    t.release_results()
    t.release_exhausted()
    t.continue_generation()
    yield from t.run_until_all_finished(requests, max_steps=2000)
    yield from t.run_until_idle()
    assert len(requests) > steps // 20
    assert t.state.kv.held == 0
    assert t.state.rows.free == t.state.rows.total
    ends = [r.finish_reason for r in requests]
    assert ends.count("length") > len(ends) // 4


def _do_something(t, choice, requests):
    live = [r for r in requests if not r.finished and not r.client.dropped]
    kind = choice.choices(
        ["start", "abort", "disconnect", "flush", "pause", "continue", "pages", "rows", "evict", "hold", "fail"],
        [20, 1, 1, 3, 2, 6, 2, 1, 2, 2, 1],
    )[0]
    if kind == "start":
        _start(t, choice, requests)
    elif kind in ("abort", "disconnect") and live:
        (t.abort if kind == "abort" else t.disconnect)(choice.choice(live))
    elif kind == "flush":
        t.flush_cache(timeout_s=choice.choice([None, 1.0]))
        t.clock.advance(choice.choice([0.0, 2.0]))
    elif kind == "pause":
        t.pause_generation(choice.choice(["retract", "in_place"]))
    elif kind == "continue":
        t.continue_generation()
        t.release_results()
        t.release_exhausted()
    elif kind == "pages":
        t.exhaust_kv(leave_pages=choice.randrange(min(8, t.state.kv.free + 1)))
    elif kind == "rows":
        t.exhaust_rows(leave_rows=choice.randrange(t.state.rows.free + 1))
    elif kind == "evict":
        t.evict()
    elif kind == "hold":
        t.hold_results()
    elif kind == "fail" and t.state.paused is None:
        t.fail_next_step(choice.randrange(t.scheduler.limits.pp_size))


def _start(t, choice, requests):
    requests.append(
        t.start_req(
            prompt_len=choice.choice([5, 16, 64, 150]),
            prompt_seed=choice.randrange(2),
            max_new_tokens=choice.choice([1, 12]),
            priority=choice.randrange(3),
        )
    )
