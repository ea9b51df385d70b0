"""The sim tier with another model's facts: a folder with a configuration is enough."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import EngineConfig
from engine.errors import CheckpointError
from scripted import ScriptedSim

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
        long = t.start_req(prompt_len=30_000, max_new_tokens=3)
        high = t.start_req(prompt_ids=[31_999] * 10, max_new_tokens=3)
        yield from t.run_until_all_finished([long, high])
        assert long.chunks_done == 59

    with ScriptedSim.start(EngineConfig(model=str(folder), pp_size=8)) as sim:
        assert sim.run(script).compared == 2


def test_a_folder_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must hold config\.json"):
        ScriptedSim(EngineConfig(model=str(tmp_path)))
    with pytest.raises(CheckpointError, match="no folder here"):
        ScriptedSim(EngineConfig(model="no/such-model"))
