"""Copies of the second tier over whole requests, and the settings that cannot go with it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from simulated_engine import SimulatedEngine, generate, prompt

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.core.limits import EMBEDDED_FACTS, EMBEDDED_WINDOW_FACTS, Limits
from engine.core.messages import EvictCache, PipelineFailed
from engine.model import capacity
from engine.process.settings import ServerSettings


def test_a_small_pool_with_a_host_says_what_a_large_one_says() -> None:
    """B02: prompts push one another out and come back, many times over."""
    sizes = {"page_size": 4, "chunked_prefill_size": 16, "pp_size": 2, "pp_async_depth": 1}
    small = SimulatedEngine(**sizes, max_total_tokens=64, host_kv_tokens=160)
    large = SimulatedEngine(**sizes, max_total_tokens=4096)
    for turn in range(12):
        messages = [generate(f"r{turn}-{salt}", prompt(26 + salt, salt), new=5) for salt in (turn % 4, turn % 3 + 4)]
        assert small.run(*messages) == large.run(*messages)
    assert small.pipeline.corruptions == []
    stats = small.scheduler.stats()
    assert stats.host_pages_loaded > 20
    assert 0 < stats.host_hit_tokens <= stats.cached_tokens


def test_nothing_of_a_dead_pipelines_copies_is_left_in_flight() -> None:
    engine = SimulatedEngine(page_size=4, chunked_prefill_size=16, max_total_tokens=64, host_kv_tokens=64)
    engine.run(generate("a", prompt(18), new=1))
    engine.step(EvictCache())
    engine.step(generate("b", prompt(18, 1), new=1))
    host = engine.scheduler.memory.host
    assert host is not None
    assert host.pages.held == 4
    engine.apply(PipelineFailed(process="stage-0", cause="killed"))
    assert host.pages.free == host.pages.total


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"host_kv_tokens": 8}, r"host_kv_tokens must be 0 or hold at least one page of page_size=16 tokens, got 8;"),
        ({"host_kv_tokens": 64, "radix_cache": False}, r"host_kv_tokens needs radix_cache.*got 64 without it;"),
        ({"host_kv_tokens": 64, "record_redacted": True}, r"record_redacted needs host_kv_tokens=0, got 64:"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(values: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        ServerSettings(**values)


def test_a_model_with_window_layers_is_refused() -> None:
    config = EngineConfig(model="embedded-window", host_kv_tokens=64)
    with pytest.raises(ConfigError, match=r"host_kv_tokens must be 0 for model 'embedded-window'.*got 64; leave"):
        Limits.of(config, EMBEDDED_WINDOW_FACTS)


def test_a_host_that_no_machine_has_is_refused_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Policies and limits hold at every size (B17)."""
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(total=10**9))
    config = EngineConfig(device="cpu", max_total_tokens=10**5, host_kv_tokens=10**9)
    with pytest.raises(ConfigError, match=r"host_kv_tokens must fit into memory .* got 1000000000: .* 1000000000; "):
        capacity.require_memory(config, EMBEDDED_FACTS, Limits.of(config, EMBEDDED_FACTS))
