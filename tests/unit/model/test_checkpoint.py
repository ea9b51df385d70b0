"""Bad checkpoints: each a CheckpointError that names the thing and the remedy (C11)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chained_stages import limits_for
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.errors import CheckpointError
from engine.model.checkpoint import read_facts, read_never_sampled_ids, require_files, resolve_folder
from engine.model.embedded import embedded_folder
from engine.model.runner import StageRunner
from engine.model.stage_model import stage_layers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded_folder(0), tmp_path / "model"))


def test_facts_of_a_whole_folder(folder: Path) -> None:
    assert read_facts(EngineConfig(model=str(folder))).num_layers == 4


def test_a_missing_folder() -> None:
    with pytest.raises(CheckpointError, match="'/no/such/folder', which is no folder here"):
        resolve_folder(EngineConfig(model="/no/such/folder"))


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a folder, got the file"):
        resolve_folder(EngineConfig(model=str(folder / "config.json")))


def test_a_hub_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(CheckpointError, match=r"'owner/name' is no folder here and could not be fetched.*no network"):
        resolve_folder(EngineConfig(model="owner/name"))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("config.json", "must hold config.json"),
        ("model.safetensors", r"must hold its weights as \*.safetensors"),
        ("tokenizer.json", "must hold a tokenizer"),
    ],
)
def test_a_missing_file(folder: Path, name: str, text: str) -> None:
    config = EngineConfig(model=str(folder))
    require_files(config)
    (folder / name).unlink()
    for check in (require_files, read_facts):
        with pytest.raises(CheckpointError, match=text):
            check(config)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "t5", "is_encoder_decoder": True}, "must be decoder-only"),
        ({"model_type": "no-such-model"}, "transformers knows"),
        ({"layer_types": ["linear_attention"] * 4}, "layers must be of types"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"dtype": "float64"}, "dtype must be one of"),
    ],
)
def test_a_config_that_cannot_be_served(folder: Path, change: dict[str, object], text: str) -> None:
    _change(folder / "config.json", change)
    with pytest.raises(CheckpointError, match=text):
        read_facts(EngineConfig(model=str(folder)))


def test_a_config_that_is_no_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json must be"):
        read_facts(EngineConfig(model=str(folder)))


def test_a_missing_weight_is_named(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.2.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"must hold the weight model\.layers\.2\.mlp\.up_proj\.weight"):
        _load(folder)


def test_a_wrong_shape_shows_both(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = torch.ones(7)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight must have shape \(64,\) .* holds \(7,\)"):
        _load(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ("one missing", r"the weight model\.layers\.3\.mlp\.experts\.down_proj must have shape \(12, .* holds \(11, "),
        ("one of another shape", r"experts\.down_proj is made of 12 parts, .* must fit together"),
        ("all missing", r"must hold the weight model\.layers\.3\.mlp\.experts\.down_proj"),
    ],
)
def test_experts_that_do_not_make_a_weight(
    change: str, text: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    """C11: the experts of a layer lie apart in the files and are one weight of the model."""
    copy = Path(shutil.copytree(checkpoint_of("qwen3_moe"), tmp_path / "moe"))
    weights = load_file(copy / "model.safetensors")
    downs = [name for name in weights if name.startswith("model.layers.3.mlp.experts.") and "down_proj" in name]
    assert len(downs) == 12
    if change == "one of another shape":
        weights[downs[5]] = torch.ones(3, 3)
    else:
        for name in downs[:1] if change == "one missing" else downs:
            del weights[name]
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=text):
        _load(copy)


def test_a_truncated_weight_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="must be a whole safetensors file"):
        _load(folder)


def test_a_shard_that_is_not_there(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(checkpoint_of("llama_sharded"), tmp_path / "sharded"))
    shards = sorted(copy.glob("*.safetensors"))
    assert len(shards) > 2
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=shards[1].name):
        _load(copy)


def test_a_stage_reads_no_weight_of_another(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model=str(folder), pp_size=4, device="cpu")
    assert not StageRunner(config, limits_for(config, vocab_size=264, num_layers=4), 1).is_last


def test_an_architecture_of_another_shape(folder: Path) -> None:
    gpt2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "vocab_size": 9, "architectures": None}
    _change(folder / "config.json", gpt2)
    with pytest.raises(CheckpointError, match=r"GPT2LMHeadModel .* has no embed_tokens"):
        _load(folder)


def test_an_architecture_that_scales_between_layers_cannot_be_cut(folder: Path) -> None:
    change = {
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.25,
        "attention_bias": False,
    }
    _change(folder / "config.json", change)
    weights = load_file(folder / "model.safetensors")
    save_file({name: t for name, t in weights.items() if "q_norm" not in name}, folder / "model.safetensors")
    assert _load(folder).is_last
    with pytest.raises(CheckpointError, match=r"changes hidden states outside of its layers.*pp_size=1"):
        _load(folder, pp_size=2, stage=1)


def test_a_device_that_is_not_there(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(CheckpointError, match="no CUDA device for 'cuda:0'"):
        StageRunner(EngineConfig(device="cuda:0"), limits_for(EngineConfig(), num_layers=4), 0)


def test_never_sampled_ids_come_from_the_generation_config(folder: Path) -> None:
    _change(folder / "generation_config.json", {"suppress_tokens": [3, 5]})
    assert read_never_sampled_ids(folder) == (3, 5)
    (folder / "generation_config.json").unlink()
    assert read_never_sampled_ids(folder) == ()


@pytest.mark.parametrize(("layers", "pp_size"), [(4, 1), (4, 4), (5, 2), (7, 3), (28, 5)])
def test_stages_share_all_layers_evenly(layers: int, pp_size: int) -> None:
    shares = [stage_layers(layers, pp_size, stage) for stage in range(pp_size)]
    assert [layer for share in shares for layer in share] == list(range(layers))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def _load(folder: Path, *, pp_size: int = 1, stage: int = 0) -> StageRunner:
    config = EngineConfig(model=str(folder), pp_size=pp_size, device="cpu")
    return StageRunner(config, limits_for(config, vocab_size=264, num_layers=4), stage)


def _change(path: Path, change: dict[str, object]) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
