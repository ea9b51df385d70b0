"""What `engine serve` says of a flag or a field that there is not: a guess only where the name means the same."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from engine import EngineConfig
from engine.cli import app
from engine.errors import ConfigError

# Names of other engines, and what must not be guessed for them.
ELSEWHERE = {
    "tp_size": "pp_size",
    "dp_size": "pp_size",
    "ep_size": "pp_size",
    "max_loras_per_batch": "max_lora_rank",
    "enable_priority_scheduling": "async_scheduling",
    "max_model_len": "max_total_tokens",
    "kv_cache_memory_bytes": "kv_cache_dtype",
    "prefill_max_requests": "max_queued_requests",
}
MISSPELT = {
    "pp_sise": "pp_size",
    "ppsize": "pp_size",
    "chunked_prefil_size": "chunked_prefill_size",
    "max_queued": "max_queued_requests",
    "schedule_polcy": "schedule_policy",
}


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _said_of(flag: str) -> str:
    done = CliRunner().invoke(app, ["serve", flag, "2"])
    assert done.exit_code == 2
    return done.output.splitlines()[-1]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_no_name_of_another_meaning_is_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a field") as caught:
        EngineConfig(**{name: 2})
    assert "did you mean" not in str(caught.value)
    said = _said_of(_flag(name))
    assert said.startswith(f"Error: No such option: {_flag(name)}")
    assert _flag(ELSEWHERE[name]) not in said


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_name_is_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{MISSPELT[name]}'"):
        EngineConfig(**{name: 2})
    assert f"(Possible options: {_flag(MISSPELT[name])})" in _said_of(_flag(name))


def test_the_switch_that_turns_a_setting_off_is_guessed_too() -> None:
    assert "--no-radix-cache" in _said_of("--no-radix-cach")
