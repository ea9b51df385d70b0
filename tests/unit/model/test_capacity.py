"""KV capacity measured beside the weights."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.core.limits import EMBEDDED_FACTS, Limits, ModelFacts
from engine.model import capacity

FACTS = ModelFacts(name="m", vocab_size=100, context_length=1000, num_layers=2, kv_bytes_per_token=100)


def checkpoint(folder: Path, weight_bytes: int) -> EngineConfig:
    (folder / "model.safetensors").write_bytes(bytes(weight_bytes))
    return EngineConfig(model=str(folder), device="cpu", max_running_requests=64)


def free_memory(monkeypatch: pytest.MonkeyPatch, free_bytes: int) -> None:
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(available=free_bytes))


def test_kv_gets_its_share_of_what_the_weights_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B17: the capacity is sized from the device when it is not set."""
    free_memory(monkeypatch, 101_000)
    config = checkpoint(tmp_path, 1_000)
    assert capacity.measure_kv_tokens(config, FACTS) == int(100_000 * capacity.KV_SHARE_CPU) // 100


def test_a_machine_with_one_stage_of_two_holds_twice_as_much(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds half of the weights and half of a token's KV."""
    free_memory(monkeypatch, 50_500)
    config = checkpoint(tmp_path, 1_000).model_copy(update={"pp_size": 2})
    found = capacity.measure_kv_tokens(config, FACTS, stages_here=1)
    assert found == int(100_000 * capacity.KV_SHARE_CPU) // 100
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(total=20_000))
    limits = Limits.of(config.model_copy(update={"max_total_tokens": 320}), FACTS)
    capacity.require_memory(config, FACTS, limits, stages_here=1)
    with pytest.raises(ConfigError, match="320 tokens of KV and their books are 35840 bytes, this machine has 20000"):
        capacity.require_memory(config, FACTS, limits, stages_here=2)


def test_loras_are_counted_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts ``max_loras`` LoRAs of the largest rank, and one that is read before another makes room."""
    free_memory(monkeypatch, 10**6)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": np.zeros((30, 20), np.float16),
        "model.layers.0.norm.weight": np.zeros(20, np.float16),
        "model.embed_tokens.weight": np.zeros((100, 20), np.float16),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    weights = (tmp_path / "model.safetensors").stat().st_size
    config = EngineConfig(model=str(tmp_path), device="cpu", max_running_requests=64)
    adapted = config.model_copy(update={"max_loras": 3, "max_lora_rank": 16})
    plain, beside = (capacity.measure_kv_tokens(one, FACTS) for one in (config, adapted))
    loras = 4 * 16 * (30 + 20) * 2
    assert plain == int((10**6 - weights) * capacity.KV_SHARE_CPU) // 100
    assert beside == int((10**6 - weights - loras) * capacity.KV_SHARE_CPU) // 100


def test_no_more_than_all_running_requests_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, 10**12)
    assert capacity.measure_kv_tokens(checkpoint(tmp_path, 10), FACTS) == 64 * 1000


def test_weights_that_leave_no_room_are_refused_with_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, 5_000)
    with pytest.raises(ConfigError, match=r"5000 bytes free.*4900 bytes of weights"):
        capacity.measure_kv_tokens(checkpoint(tmp_path, 4_900), FACTS)


def test_the_embedded_model_has_the_same_capacity_everywhere() -> None:
    assert capacity.measure_kv_tokens(EngineConfig(), EMBEDDED_FACTS) is None


@pytest.mark.parametrize("facts", [FACTS, EMBEDDED_FACTS, msgspec.structs.replace(FACTS, kv_bytes_per_token=0)])
def test_a_capacity_that_no_machine_holds_is_refused_with_the_numbers(
    facts: ModelFacts, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B17: also where the KV itself costs nothing; one that fits is taken."""
    monkeypatch.setattr(capacity.psutil, "virtual_memory", lambda: SimpleNamespace(total=10**9))
    config = EngineConfig(device="cpu", max_total_tokens=10**15)
    with pytest.raises(ConfigError, match=r"max_total_tokens must fit into memory, got 10{15}: .* 1000000000;"):
        capacity.require_memory(config, facts, Limits.of(config, facts))
    small = EngineConfig(device="cpu", max_total_tokens=10**5)
    capacity.require_memory(small, facts, Limits.of(small, facts))
