"""Random scripts: every verb in random orders, over random configurations, with ledger, audit and oracle watching."""

from __future__ import annotations

import random

import pytest
from thinned import thinned

from engine import EngineConfig
from scripted import ScriptedSim

SCRIPTS = 20
STEPS = 150
MAX_REQUESTS = 10
VERBS = ("start", "abort", "flush", "pause", "hold", "press", "hang up", "none")
WEIGHTS = (6, 1, 1, 1, 1, 2, 1, 12)


def config_of(rng: random.Random) -> EngineConfig:
    pp_size = rng.randint(1, 4)
    return EngineConfig(
        pp_size=pp_size,
        pp_async_depth=rng.randint(0, 2),
        page_size=rng.choice([4, 16]),
        max_total_tokens=rng.choice([128, 512]),
        max_running_requests=rng.randint(2, 6),
        chunked_prefill_size=rng.choice([-1, 16, 64]),
        mixed_chunk=rng.random() < 0.5,
        async_scheduling=pp_size == 1 and rng.random() < 0.5,
        radix_cache=rng.random() < 0.8,
    )


def anything(t, seed: int):
    rng, rs, pause = random.Random(seed), [], False
    for _ in range(STEPS):
        live = [r for r in rs if not r.finished]
        verb = rng.choices(
            ["start", "abort", "flush", "pause", "hold", "press", "hang up", "none"], [6, 1, 1, 1, 1, 2, 1, 12]
        )[0]
        if verb == "start" and len(live) < MAX_REQUESTS:
            new, stop, seed = rng.choice([1, 3, 12]), rng.choice([(), (), ("a", "Z!")]), rng.randrange(3)
            rs.append(t.start_req(prompt_len=rng.randint(1, 90), prompt_seed=seed, max_new_tokens=new, stop=stop))
        elif verb == "abort" and live:
            t.abort(rng.choice(live))
        elif verb == "hang up" and (connected := [r for r in live if not r.client.dropped]):
            t.disconnect(rng.choice(connected))
        elif verb == "flush":
            t.flush_cache(rng.choice([None, 2.0]))
        elif verb == "pause":
            _ = t.continue_generation() if pause else t.pause_generation(rng.choice(["retract", "in_place", "abort"]))
            pause = not pause
        elif verb == "hold":
            _ = t.hold_results() if rng.random() < 0.5 else t.release_results()
        elif verb == "press":
            press(t, rng)
        t.clock.advance(rng.random())
        yield
    t.release_exhausted()
    t.release_results()
    t.continue_generation()
    yield from t.run_until_all_finished(rs, max_steps=4000)


def press(t, rng: random.Random) -> None:
    pressure = t.scheduler.pressure
    which = rng.randrange(5)
    if which == 0:
        t.exhaust_kv(min(rng.randrange(8), pressure.most_free_pages))
    elif which == 1:
        t.exhaust_rows(min(rng.randrange(2), pressure.most_free_rows))
    elif which == 2:
        t.exhaust_locks(min(rng.randrange(2), pressure.most_unlocked_nodes))
    elif which == 3:
        t.release_exhausted()
    else:
        t.evict()


@pytest.mark.parametrize("seed", thinned(range(SCRIPTS), one_in=4))
def test_nothing_breaks_and_everything_ends(seed: int) -> None:
    """B05, D02, D10: twice the same script is twice the same run."""
    config = config_of(random.Random(seed))
    with ScriptedSim.start(config) as sim:
        assert sim.run(anything, seed).digest == sim.run(anything, seed).digest
