"""Names that people bring along from other engines lead to what does the same here, not to what is spelt alike."""

from __future__ import annotations

import pytest

from engine import EngineConfig
from engine.core.errors import ConfigError
from scripted import ScriptedSim
from scripted.report.failure import ScriptFailed


@pytest.mark.parametrize(
    ("setting", "said", "misleading"),
    [
        ("tp_size", "not split by tensors", "did you mean 'pp_size'"),
        ("max_loras_per_batch", "max_loras bounds", "max_lora_rank"),
        ("enable_priority_scheduling", "schedule_policy='priority'", "async_scheduling"),
    ],
)
def test_a_setting_of_another_engine(setting: str, said: str, misleading: str) -> None:
    with pytest.raises(ConfigError) as refused:
        EngineConfig(**{setting: 1})
    assert said in str(refused.value)
    assert misleading not in str(refused.value)


def test_idle_has_two_meanings() -> None:
    """The flush race lies where they differ, so the hint names both."""

    def script(t):
        assert not t.is_idle
        yield

    with pytest.raises(ScriptFailed, match=r"state\.queues_clear: nothing waits or runs; state\.is_fully_idle: and"):
        ScriptedSim.start(EngineConfig()).run(script)
