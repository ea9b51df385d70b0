"""Random schedules: messages, completions and faults in random orders, over random configurations, from a seed."""

from __future__ import annotations

import random

import pytest
from simulated_engine import POLICIES, SimulatedEngine, alone, generate, limits_of, prompt
from thinned import thinned

from engine.core.messages import (
    Abort,
    AbortAll,
    ContinueGeneration,
    Event,
    FinishReason,
    FlushCache,
    GetStats,
    PauseGeneration,
    PauseMode,
)

SCHEDULES = 24
STEPS = 120
RIDS = 30


def random_config(rng: random.Random) -> dict[str, object]:
    page = rng.choice([1, 4, 16])
    policy = rng.choice(["fcfs", *POLICIES])
    pp = rng.randint(1, 4)
    return {
        "pp_size": pp,
        "pp_async_depth": rng.randint(0, 6 - pp),
        "page_size": page,
        "max_total_tokens": page * rng.choice([4, 8, 12, 24, 64, 256]),
        "max_running_requests": rng.randint(1, 8),
        "max_queued_requests": rng.choice([3, 12, 100]),
        "chunked_prefill_size": rng.choice([-1, 1, 2, 3, 8, 16, 33, 64]),
        "max_prefill_tokens": rng.choice([40, 200, 16_384]),
        "mixed_chunk": rng.random() < 0.5,
        "context_length": rng.choice([None, 60, 150]),
        "radix_cache": rng.random() < 0.8,
        "schedule_policy": policy,
        "priority_preemption": policy == "priority" and rng.random() < 0.7,
        "async_scheduling": pp == 1 and rng.random() < 0.7,
    }


class RandomClients:
    """Draws the messages of one step."""

    def __init__(self, rng: random.Random, room_tokens: int) -> None:
        self._rng = rng
        self._calls = 0
        longest = max(2, min(120, room_tokens - 8))
        self._stems = [prompt(rng.randint(1, longest), salt) for salt in range(3)]
        self._busy = rng.choice([0.1, 0.3, 0.6])

    def messages(self) -> list[Event]:
        rng = self._rng
        drawn: list[Event] = []
        if rng.random() < self._busy:
            # Distinct rids within one step, so that a refusal tells which of two messages it answers.
            drawn += [self._request(rid) for rid in rng.sample(range(RIDS), rng.choice([1, 1, 2, 5]))]
        if rng.random() < 0.25:
            drawn.append(self._administration())
        rng.shuffle(drawn)
        return drawn

    def _request(self, rid: int) -> Event:
        rng = self._rng
        stem = rng.choice(self._stems)
        ids = stem[: rng.randint(1, len(stem))] + prompt(rng.randint(0, 9), rng.randint(0, 4))
        sampling = {"temperature": 1.0, "seed": rng.randint(0, 3)} if rng.random() < 0.3 else {}
        return generate(f"r{rid}", ids, rng.choice([1, 2, 5, 20]), priority=rng.randint(0, 2), **sampling)

    def _administration(self) -> Event:
        rng = self._rng
        self._calls += 1
        call = f"call {self._calls}"
        kind = rng.choices(["abort", "all", "flush", "later", "pause", "go", "stats"], [8, 1, 4, 2, 2, 4, 1])[0]
        if kind == "abort":
            return Abort(rid=f"r{rng.randrange(RIDS)}", call_id=call)
        if kind == "pause":
            return PauseGeneration(call_id=call, mode=rng.choice(list(PauseMode)))
        timeout_s = rng.choice([0.0, 3.0, 50.0]) if kind == "later" else None
        simple: dict[str, Event] = {
            "all": AbortAll(call_id=call),
            "flush": FlushCache(call_id=call),
            "later": FlushCache(call_id=call, timeout_s=timeout_s),
            "go": ContinueGeneration(call_id=call),
            "stats": GetStats(call_id=call),
        }
        return simple[kind]


def window_config(rng: random.Random, config: dict[str, object]) -> dict[str, object]:
    """A window, and a window pool that is as large as it may be, or as small, or in between."""
    limits = limits_of(window=rng.choice([1, 3, 16, 40]), **config)
    least = min(limits.row_window_pages, limits.total_pages)
    pages = rng.choice([None, least, least, rng.randint(least, limits.total_pages)])
    tokens = None if pages is None else pages * limits.page_size
    return {"window": limits.window_tokens, "max_window_tokens": tokens}


def run_schedule(seed: int, *, faults: bool, windows: bool = False) -> SimulatedEngine:
    rng = random.Random(seed)
    config = random_config(rng)
    if windows:
        config |= window_config(rng, config)
    engine, eager = SimulatedEngine(**config), rng.uniform(0.2, 1)
    clients = RandomClients(rng, min(engine.limits.total_pages * engine.limits.page_size, engine.limits.context_length))
    for _ in range(STEPS):
        engine.now += rng.random()
        if faults and rng.random() < 0.05:
            engine.pipeline.fail_next_step(0)
        completions = rng.randint(1, engine.limits.depth) if rng.random() < eager else 0
        engine.step(*clients.messages(), completions=completions)
    if faults and rng.random() < 0.2:
        engine.pipeline.kill_stage(0)
    engine.drain(ContinueGeneration(call_id="last"))
    check_end(engine, config)
    return engine


def check_end(engine: SimulatedEngine, config: dict[str, object]) -> None:
    assert not engine.pipeline.corruptions
    memory = engine.scheduler.memory
    assert memory.pages.held == 0
    assert memory.rows.free == memory.rows.total
    if memory.sliding_window is not None:
        assert memory.sliding_window.pages.held == 0
        assert memory.sliding_window.available_pages == memory.sliding_window.pages.total
    assert not engine.scheduler.books.requests
    known: dict[object, list[int]] = {}
    for life in engine.lives:
        assert life.ended, f"{life} never got its terminal reply"
        if life.finish_reason is FinishReason.ERROR:
            assert life.error
        if life.finish_reason is FinishReason.LENGTH:
            key = (life.message.prompt_ids, life.message.sampling)
            if key not in known:
                known[key] = alone(life.message, **config)
            assert life.tokens == known[key]


@pytest.mark.parametrize("seed", thinned(range(SCHEDULES), one_in=2))
def test_random_schedule(seed: int) -> None:
    """B02, B06, B07, B11, B12, B15.

    Whatever the order of events, nothing leaks, ends twice, hangs or says other tokens.
    """
    run_schedule(seed, faults=seed % 3 == 0)


@pytest.mark.parametrize("seed", thinned(range(1000, 1000 + SCHEDULES), one_in=2))
def test_random_schedule_of_a_window_model(seed: int) -> None:
    """B18: nor does it over window pools of any size; no window page is read after it was given back."""
    run_schedule(seed, faults=seed % 3 == 0, windows=True)
