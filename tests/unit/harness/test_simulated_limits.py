"""The sim tier with another model's facts: a folder with a configuration is enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from scripted_lockstep.configs import MOST_PAGES, limits_of
from typer.testing import CliRunner

from engine import EngineConfig
from engine.core.errors import CheckpointError, ConfigError
from engine.core.messages import FinishReason, TokenOutput
from scripted import ScriptedSim
from scripted.cli import app
from scripted.core.schedule import Schedule
from scripted.search.execution import record

CONFIG = {
    "model_type": "mistral",
    "vocab_size": 32_000,
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32_768,
    "intermediate_size": 128,
    "sliding_window": 1024,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_configuration_is_enough(folder: Path) -> None:
    """A context of 32k, a window of 1,024 tokens and a vocabulary of 32,000, without weights and tokenizer."""

    def script(t):
        limits = t.scheduler.limits
        assert (limits.context_length, limits.window_tokens, limits.vocab_size) == (32_768, 1024, 32_000)
        long = t.start_req(prompt_len=10_000, max_new_tokens=3)
        high = t.start_req(prompt_ids=[31_999] * 10, max_new_tokens=3)
        yield from t.run_until_all_finished([long, high])
        assert long.chunks_done == 20

    with ScriptedSim.start(EngineConfig(model=str(folder), pp_size=8)) as sim:
        assert sim.run(script).compared == 2


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must hold config\.json"):
        ScriptedSim.start(EngineConfig(model=str(tmp_path)))
    with pytest.raises(CheckpointError, match="not a folder here"):
        ScriptedSim.start(EngineConfig(model="no/such-model"))


@pytest.mark.nightly
def test_a_schedule_runs_with_them(folder: Path) -> None:
    """Searched, replayed here and in a fresh process, and compared with each request alone."""
    line = (
        f"model={folder} pp_size=8 seed=3 chunked_prefill_size=1024; 1 start a prompt=1500 new=3; "
        "1 start b prompt=100 seed=1 new=3; "
        "30 update seed=3; 40 start c prompt=9 new=3"
    )
    schedule = Schedule.parse(line)
    assert Schedule.parse(str(schedule)) == schedule
    assert (limits_of(schedule.config).context_length, limits_of(schedule.config).vocab_size) == (32_768, 32_000)
    outcome, records = record(schedule)
    assert outcome.failure is None
    assert {reply.prompt_tokens for one in records for reply in one.replies if isinstance(reply, TokenOutput)} == {
        1_500, 100, 9,
    }  # fmt: skip
    done = CliRunner().invoke(app, ["replay", line, "--twice"])
    assert done.exit_code == 0, done.output
    done = CliRunner().invoke(app, ["explore", line, "--schedules", "2"])
    assert done.exit_code == 0, done.output


def test_an_end_token_of_the_model_ends_a_request_in_the_search_and_alone(tmp_path: Path) -> None:
    """Every token that the simulated model says is one of this model's end tokens, as they are not in the embedded."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"eos_token_id": list(range(33, 127))}))
    outcome, records = record(Schedule.parse(f"model={tmp_path}; 1 start a prompt=9 new=5"))
    assert outcome.failure is None
    told = [reply for one in records for reply in one.replies if isinstance(reply, TokenOutput)]
    assert [(reply.finish_reason, reply.completion_tokens) for reply in told] == [(FinishReason.STOP, 1)]


def test_the_shell_takes_them(folder: Path) -> None:
    commands = "start prompt_len=9000 max_new_tokens=2\nuntil r1.finished\nhistory\nquit\n"
    done = CliRunner().invoke(app, ["shell", "--chunk", "4096", "--set", f"model={folder}"], input=commands)
    assert done.exit_code == 0, done.output
    assert "1 output compared" in done.output


def test_the_shell_shows_the_steps_of_an_engine_that_died_with_them(folder: Path) -> None:
    """More stages than the embedded model has layers."""
    race = ["start prompt_len=125 max_new_tokens=2", "until state.in_flight and state.queues_clear", "flush"]
    commands = "\n".join([*race, "until r1.finished", "history", "quit", ""])
    flags = ["--pp-size", "8", "--set", f"model={folder}", "--mutant", "flush-ignores-in-flight"]
    done = CliRunner().invoke(app, ["shell", *flags], input=commands)
    assert "The scheduler is dead" in done.output
    assert "s7" in done.output.partition("The scheduler is dead")[2]


def test_a_lora_of_the_start_has_another_name_than_the_model() -> None:
    with pytest.raises(ConfigError, match="lora must give LoRAs other names than the served model's, got 'embedded'"):
        ScriptedSim.start(EngineConfig(lora="embedded=embedded-lora:1"))


@pytest.mark.parametrize("name", ["max_total_tokens", "host_kv_tokens"])
def test_more_pages_than_can_be_recorded_are_refused_before_they_are_made(name: str) -> None:
    most = MOST_PAGES * 16
    assert limits_of(EngineConfig(**{name: most}))
    with pytest.raises(ConfigError, match=f"{name} must be at most {MOST_PAGES} pages .* got {most + 16}"):
        ScriptedSim.start(EngineConfig(**{name: most + 16}))
