"""Every backend and form of KV sleeps and wakes: what it says afterwards is what it said before."""

from __future__ import annotations

import importlib.util

import pytest
from chained_stages import DEVICE, ChainedStages
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, EMBEDDED_WINDOW_FACTS, Limits
from engine.core.plan import LoraChange, LoraOrder, LoraUpdate, SamplingSpec, SleepSwitch
from engine.model.sleeping_stage import AsleepStage

PROMPT = list(b"a prompt that fills two pages of KV, and then goes on a little")
SPEC = SamplingSpec(seed=0)
KINDS = [
    {"backend": "torch"},
    {"backend": "torch", "pp_size": 2, "host_kv_tokens": 128},
    {"backend": "torch", "async_scheduling": True},
    {"backend": "torch", "model": "embedded-window"},
    {"backend": "torch", "speculative_algorithm": "draft_model", "speculative_draft_model": "embedded"},
    *([{"backend": "openvino", "device": "cpu"}] if importlib.util.find_spec("openvino") is not None else []),
]


def chain_of(**values: object) -> ChainedStages:
    config = EngineConfig(
        **{"device": DEVICE, "context_length": 256, "page_size": 32, "kv_sanitizer": True, "max_total_tokens": 2048}
        | values
    )
    facts = EMBEDDED_WINDOW_FACTS if "window" in config.model else EMBEDDED_FACTS
    return ChainedStages(config, Limits.of(config, facts), early=True)


def switch(chain: ChainedStages, level: int) -> None:
    for runner in chain.runners:
        assert runner.prepare(SleepSwitch(90 + level, level)) is None
        runner.settle(90 + level, commit=True)


@pytest.mark.parametrize("kind", thinned(KINDS, one_in=3), ids=lambda kind: "-".join(map(str, kind.values())))
def test_it_says_after_a_sleep_what_it_said_before(kind: dict[str, object]) -> None:
    chain = chain_of(**kind)
    before = chain.generate(0, PROMPT, 6, chunk=64, spec=SPEC)
    switch(chain, 1)
    assert all(isinstance(runner.model, AsleepStage) for runner in chain.runners)
    switch(chain, 0)
    assert chain.generate(1, PROMPT, 6, chunk=64, spec=SPEC) == before


def test_loras_outlive_a_sleep() -> None:
    chain = chain_of(max_loras=1, lora="x=embedded-lora:1")
    for runner in chain.runners:
        assert runner.begin_lora(LoraOrder(1, "x", "embedded-lora:1"))() is None
        assert runner.prepare(LoraUpdate(80, LoraChange("x", 1, "embedded-lora:1"))) is None
        runner.settle(80, commit=True)
    held = [runner.model.lora.held[1] for runner in chain.runners]
    switch(chain, 1)
    switch(chain, 0)
    assert [runner.model.lora.held[1] for runner in chain.runners] == held
