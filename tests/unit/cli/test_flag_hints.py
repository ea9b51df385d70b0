"""Answers of `engine serve` to an unknown flag or field: a guess only where the name means the same."""

from __future__ import annotations

import pytest
from every_case import every_case
from typer.testing import CliRunner

from engine import EngineConfig
from engine.cli import app
from engine.core.errors import ConfigError

# Names of other engines, and what must not be guessed for them.
ELSEWHERE = {
    "tp_size": "pp_size",
    "dp_size": "pp_size",
    "ep_size": "pp_size",
    "max_loras_per_batch": "max_lora_rank",
    "enable_priority_scheduling": "async_scheduling",
    "gpu_memory_utilization": "max_total_tokens",
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


@every_case("name", ELSEWHERE)
def test_no_name_of_another_meaning_is_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is not a field") as caught:
        EngineConfig(**{name: 2})
    assert "did you mean" not in str(caught.value)
    said = _said_of(_flag(name))
    assert said.startswith("Error: ")
    assert _flag(name) in said
    assert _flag(ELSEWHERE[name]) not in said


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_name_is_guessed(name: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean '{MISSPELT[name]}'"):
        EngineConfig(**{name: 2})
    assert f"(Possible options: {_flag(MISSPELT[name])})" in _said_of(_flag(name))


@every_case(
    ("args", "expected"),
    [
        (["--max-model-len", "512"], {"context_length": 512}),
        (["--max_model_len=512"], {"context_length": 512}),
        (["--max-num-seqs", "8", "--block-size=32"], {"max_running_requests": 8, "page_size": 32}),
        (["--tensor-parallel-size", "1", "--port", "1"], {"port": 1}),
        (["--tp-size=1", "--dp", "1", "-tp", "1", "--enforce-eager"], {"cuda_graphs": "off"}),
        (["--enable-prefix-caching"], {"radix_cache": True}),
        (["--dtype", "half", "--tool-call-parser=llama3_json"], {"dtype": "float16", "tool_call_parser": "llama3"}),
        (
            ["--dtype=bfloat16", "--reasoning-parser", "deepseek_r1"],
            {"dtype": "bfloat16", "reasoning_parser": "deepseek-r1"},
        ),
        (
            ["--task", "generate", "--load-format=auto", "--scheduling-policy", "priority"],
            {"schedule_policy": "priority"},
        ),
        (["--disable-radix-cache", "-pp", "2"], {"radix_cache": False, "pp_size": 2}),
        (["--pp_size", "2", "--disable-log-requests"], {"pp_size": 2, "log_requests": False}),
        (["--lora-modules", "a=/a", "b=/b", "--port", "1"], {"lora": "a=/a,b=/b", "port": 1}),
        (["--random-seed", "5", "--model-path", "embedded:3"], {"seed": 5, "model": "embedded:3"}),
        (["embedded:4", "--port", "1"], {"model": "embedded:4", "port": 1}),
        (["--port", "1", "--model", "embedded:4", "embedded:4"], {"model": "embedded:4", "port": 1}),
    ],
)
def test_flags_of_other_engines_that_mean_the_same(args: list[str], expected: dict[str, object]) -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    done = CliRunner().invoke(app, ["config", *args])
    assert done.exit_code == 0, done.output
    rows = [line.split() for line in done.stdout.splitlines()]
    assert {row[0]: row[1] for row in rows if row[-1].startswith("--")} == {
        name: str(value) for name, value in expected.items()
    }
