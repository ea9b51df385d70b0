"""KV capacity measured beside the weights."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch
import transformers
from chained_stages import limits_for
from safetensors.numpy import save_file
from thinned import thinned
from tiny_checkpoints import SHAPE, save_weights

from engine.core.config import EngineConfig
from engine.core.errors import ConfigError
from engine.core.limits import EMBEDDED_FACTS, Limits, ModelFacts
from engine.model import capacity, stage_model
from engine.model.arithmetic import compute_dtype
from engine.model.stage_model import StageModel
from engine.model.weight_sizes import held_weight_bytes

FACTS = ModelFacts(name="m", vocab_size=100, context_length=1000, num_layers=2, kv_bytes_per_token=100)


def checkpoint(folder: Path, weight_bytes: int) -> EngineConfig:
    save_weights(folder, weight_bytes)
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
    with pytest.raises(
        ConfigError, match="320 tokens of KV and their bookkeeping take 35840 bytes, this machine has 20000"
    ):
        capacity.require_memory(config, FACTS, limits, stages_here=2)


def test_loras_are_counted_beside_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts ``max_loras`` LoRAs of the largest rank, and one that is read before another makes room."""
    free_memory(monkeypatch, 10**6)
    tensors = {
        "model.layers.0.mlp.up_proj.weight": np.zeros((30, 20), np.float32),
        "model.layers.0.norm.weight": np.zeros(20, np.float32),
        "model.embed_tokens.weight": np.zeros((100, 20), np.float32),
    }
    config = checkpoint(tmp_path, 4)
    save_file(tensors, tmp_path / "model.safetensors")
    weights = 4 * (30 * 20 + 20 + 100 * 20)
    adapted = config.model_copy(update={"max_loras": 3, "max_lora_rank": 16})
    plain, beside = (capacity.measure_kv_tokens(one, FACTS) for one in (config, adapted))
    loras = 4 * 16 * (30 + 20) * 4
    assert plain == int((10**6 - weights) * capacity.KV_SHARE_CPU) // 100
    assert beside == int((10**6 - weights - loras) * capacity.KV_SHARE_CPU) // 100


def test_no_more_than_all_running_requests_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    free_memory(monkeypatch, 10**12)
    assert capacity.measure_kv_tokens(checkpoint(tmp_path, 12), FACTS) == 64 * 1000


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


# In multiples of 64 rows, to which packed weights are padded.
EVEN = SHAPE | {"vocab_size": 256, "intermediate_size": 128, "num_hidden_layers": 2}


def weight_tensors() -> dict[int, int]:
    """Return the bytes of all weights by address, told by shape: angles have three dimensions, scratch has a 1."""
    found = {}
    for one in gc.get_objects():
        if not isinstance(one, torch.Tensor) or not one.is_floating_point():
            continue
        if one.is_mkldnn:
            found[id(one)] = torch.ops.mkldnn._nbytes(one)
        elif one.dim() in (1, 2) and 1 not in one.shape and one.numel() != EVEN["head_dim"] // 2:
            found[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
    return found


@pytest.mark.parametrize("family", thinned(["qwen3 tied", "qwen3", "qwen2 tied", "gemma2 tied"], one_in=3))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("threads", thinned([2, 1], one_in=2))
def test_weights_are_counted_as_a_loaded_stage_holds_them(
    family: str, dtype: str, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B17: in fp32 where the CPU has no 16-bit products, and a packed tied head beside the embedding."""
    kind, _, tied = family.partition(" ")
    make: Callable[..., transformers.PreTrainedConfig] = {
        "qwen3": transformers.Qwen3Config,
        "qwen2": transformers.Qwen2Config,
        "gemma2": transformers.Gemma2Config,
    }[kind]
    model = transformers.AutoModelForCausalLM.from_config(make(**EVEN, tie_word_embeddings=bool(tied)))
    model.to(getattr(torch, dtype)).save_pretrained(tmp_path)
    del model
    monkeypatch.setattr(stage_model.torch, "get_num_threads", lambda: threads)
    config = EngineConfig(model=str(tmp_path), device="cpu", backend="torch", page_size=4)
    gc.collect()
    before = weight_tensors()
    stage = StageModel(config, limits_for(config, vocab_size=256, num_layers=2), 0)
    gc.collect()
    assert stage.is_lean is (kind != "gemma2")
    kv = {part.untyped_storage().data_ptr() for part in (stage.pool.keys, stage.pool.values)}
    held = sum(size for place, size in weight_tensors().items() if place not in before and place not in kv)
    assert held_weight_bytes(config, device_type="cpu", threads=threads) == held


def test_kv_gets_what_the_loaded_weights_leave(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """B17: the weights count as they are held, not as the files are."""
    transformers.set_seed(1)
    config = transformers.LlamaConfig(**EVEN, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path)
    free_memory(monkeypatch, 10**6)
    monkeypatch.setattr(capacity, "stage_threads", lambda *_: 2)
    layers = 2 * (64 * 128 + 64 * 64 + 3 * 64 * 128 + 2 * 64) + 64
    computed = compute_dtype(torch.bfloat16).itemsize
    held = 2 * 256 * 64 + computed * (256 * 64 + layers)
    settings = EngineConfig(model=str(tmp_path), device="cpu", backend="torch", max_running_requests=64)
    assert capacity.measure_kv_tokens(settings, FACTS) == int((10**6 - held) * capacity.KV_SHARE_CPU) // 100
