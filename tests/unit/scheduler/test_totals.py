"""Totals: the scheduler's counts equal its clients' requests and replies."""

from __future__ import annotations

from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.messages import AbortAll, FinishReason, LoadLora, UpdateWeights
from engine.core.scheduler.counters import Counters


def test_totals_of_a_life_of_everything() -> None:
    """Started, finished, aborted, refused; tokens of prompts, from the cache and generated; passes and updates."""
    engine = SimulatedEngine(chunked_prefill_size=32, max_total_tokens=512, max_loras=1)
    assert set(_totals(engine).values()) == {0}
    ids = prompt(40)
    engine.run(generate("a", ids, 3))
    engine.run(generate("b", ids, 2), generate("far too long", prompt(600), 2))
    engine.step(generate("c", prompt(20, 1), 50))
    engine.step(completions=1)
    engine.drain(AbortAll())
    engine.drain(UpdateWeights(call_id="u", model_path=None))
    engine.drain(*[LoadLora(call_id=name, name=name, path="embedded-lora:1") for name in "xy"])
    lives = [life for life in engine.lives if life.refusal is None]
    assert [life.finish_reason for life in lives] == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.ABORT]
    assert _totals(engine) == {
        "requests_started": 3,
        "requests_finished": 2,
        "requests_aborted": 1,
        "requests_refused": 1,
        "prompt_tokens": 40 + 40 + 20,
        "cached_tokens": 32,
        "generated_tokens": sum(len(life.tokens) for life in lives),
        "forward_ct": len(engine.microbatches),
        "weights_version": 1,
        "requests_timed_out": 0,
        "lora_loads": 2,
        "lora_evictions": 1,
        "retractions": 0,
        "drafted_tokens": 0,
        "accepted_tokens": 0,
        "grammars_compiled": 0,
        "grammar_hits": 0,
        "host_hit_tokens": 0,
        "host_pages_written": 0,
        "host_pages_loaded": 0,
        "pages_received": 0,
        "pages_sent": 0,
    }
    assert [microbatch.id for microbatch in engine.microbatches] == list(range(len(engine.microbatches)))


def _totals(engine: SimulatedEngine) -> dict[str, int]:
    """Return each counter from the statistics."""
    stats = engine.scheduler.stats()
    return {name: getattr(stats, name) for name in Counters.__slots__}
