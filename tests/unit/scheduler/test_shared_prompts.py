"""Equal prompts that arrive together: each step follows the specification, with any other events."""

from __future__ import annotations

import random
from typing import Any

import pytest
from thinned import thinned

from engine import EngineConfig
from scripted import ScriptedSim

COMMON = list(range(32, 132)) * 20
# Around the bounds: 512 tokens are spared, and half of what there is to compute.
LENGTHS = (400, 511, 512, 527, 528, 600, 1024, 1100)
MORE = (1, 16, 500, 512, 513, 600)


def mixture(t: Any, seed: int) -> Any:
    """Requests that begin alike, with failures, aborts, pauses, retractions, flushes and held results beside them."""
    chance, handles = random.Random(seed), list[Any]()
    for _ in range(50):
        what = chance.choices(
            ["start", "abort", "pause", "hold", "fail", "flush", "evict", "go on"], [12, 2, 1, 2, 1, 1, 1, 8]
        )[0]
        if what == "start" and len(handles) < 16:
            prompt = COMMON[: chance.choice(LENGTHS)] + [200 + chance.randrange(2)] * chance.choice(MORE)
            asked = (
                {"return_logprob": True, "logprob_start_len": chance.choice([0, 350])} if chance.random() < 0.1 else {}
            )
            lora = chance.choice([None, None, "a"]) if t.scheduler.limits.max_loras else None
            tokens = chance.randint(0, 6)
            more = {"lora": lora, "priority": chance.randrange(3)} if lora else {"priority": chance.randrange(3)}
            handles.append(t.start_req(prompt_ids=prompt, max_new_tokens=tokens, **more, **asked))
        elif what == "abort" and handles:
            t.abort(chance.choice(handles))
        elif what == "pause":
            t.pause_generation(chance.choice(["retract", "in_place"]))
        elif what == "hold":
            t.hold_results()
        elif what == "fail":
            t.fail_next_step(0)
        elif what == "flush":
            t.flush_cache()
        elif what == "evict":
            t.evict()
        elif what == "go on":
            t.continue_generation()
            t.release_results()
        yield
    t.continue_generation()
    t.release_results()
    yield from t.run_until_all_finished(handles)
    yield from t.run_until_idle()
    assert t.engine_stats().cached_tokens or not t.scheduler.limits.radix_cache, "nothing was hit"


CONFIGS = {
    "one stage": {"chunked_prefill_size": -1},
    "two stages": {"pp_size": 2, "max_loras": 1, "lora": "a=embedded-lora:1"},
    "four stages": {"pp_size": 4, "pp_async_depth": 2, "schedule_policy": "lpm", "chunked_prefill_size": 1100},
    "planned ahead": {"async_scheduling": True, "mixed_chunk": True, "chunked_prefill_size": 700},
    "small pages": {"pp_size": 2, "page_size": 1, "schedule_policy": "priority", "priority_preemption": True},
    "window layers": {"pp_size": 2, "model": "embedded-window"},
    "second tier": {"pp_size": 2, "host_kv_tokens": 4096, "max_total_tokens": 4096},
    "few rows": {"pp_size": 3, "max_running_requests": 2, "max_total_tokens": 3200, "chunked_prefill_size": 2048},
    "no cache": {"pp_size": 2, "radix_cache": False},
}


@pytest.mark.parametrize("name", thinned(CONFIGS, one_in=3))
def test_each_step_is_as_specified(name: str) -> None:
    with ScriptedSim.start(EngineConfig(**CONFIGS[name])) as engine:
        for seed in range(5):
            engine.run(mixture, seed)
