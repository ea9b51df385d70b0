"""Bad checkpoints: each a CheckpointError that names the thing and the remedy (C11)."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from chained_stages import limits_for
from every_case import every_case
from safetensors.torch import load_file, save_file

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.frontend.text.tokenizer import load_tokenizer
from engine.model.checkpoint import (
    local_folder,
    read_facts,
    read_never_sampled_ids,
    require_files,
    resolve_folder,
    tokenizer_reader,
)
from engine.model.embedded import embedded_folder
from engine.model.lora_config import lora_folder
from engine.model.runner import StageRunner
from engine.model.stage_slice import stage_layers


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(embedded_folder(0), tmp_path / "model"))


def test_facts_of_a_whole_folder(folder: Path) -> None:
    assert read_facts(EngineConfig(model=str(folder))).num_layers == 4


def test_a_missing_folder() -> None:
    with pytest.raises(CheckpointError, match="'/no/such/folder', which is not a folder here"):
        resolve_folder(EngineConfig(model="/no/such/folder"))


def test_a_file_instead_of_a_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="must be a folder, got the file"):
        resolve_folder(EngineConfig(model=str(folder / "config.json")))


def test_a_hub_name_that_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def offline(*_: object, **__: object) -> str:
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(
        CheckpointError, match=r"'owner/name' is not a folder here and could not be fetched.*no network"
    ):
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
        ({"model_type": "no-such-model"}, "transformers can read"),
        ({"layer_types": ["linear_attention"] * 4}, "layers must be of types"),
        ({"kv_lora_rank": 8}, "latent"),
        ({"dtype": "float64"}, "dtype must be one of"),
    ],
)
def test_a_config_that_cannot_be_served(folder: Path, change: dict[str, object], text: str) -> None:
    _change(folder / "config.json", change)
    with pytest.raises(CheckpointError, match=text):
        read_facts(EngineConfig(model=str(folder)))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"eos_token_id": "two"}, "eos_token_id as a token id or a list of them, got 'two'"),
        ({"eos_token_id": [1, "2"]}, "eos_token_id as a token id or a list"),
        ({"eos_token_id": -1}, "eos_token_id as a token id or a list of them, got -1"),
        ({"eos_token_id": 1.5}, "eos_token_id as a token id or a list"),
        ({"eos_token_id": True}, "eos_token_id as a token id or a list"),
        ({"eos_token_id": {"id": 2}}, "eos_token_id as a token id or a list"),
        ({"eos_token_id": [[2]]}, "eos_token_id as a token id or a list"),
        ({"eos_token_id": 264}, "eos_token_id below vocab_size=264, got 264"),
        ({"eos_token_id": [257, 10**30]}, "eos_token_id below vocab_size=264"),
    ],
)
def test_a_wrong_end_of_sequence_is_refused_with_the_file(folder: Path, change: dict[str, object], text: str) -> None:
    """C11: before any request could fail by it."""
    _change(folder / "generation_config.json", change)
    with pytest.raises(CheckpointError, match=text) as caught:
        read_facts(EngineConfig(model=str(folder)))
    assert "generation_config.json" in str(caught.value)


@pytest.mark.parametrize(("said", "ids"), [(5, (5,)), ([5, 6], (5, 6)), (None, ()), ([], ())])
def test_an_end_of_sequence_is_one_id_or_several_or_none(folder: Path, said: object, ids: tuple[int, ...]) -> None:
    _change(folder / "generation_config.json", {"eos_token_id": said})
    assert read_facts(EngineConfig(model=str(folder))).eos_token_ids == ids


@pytest.mark.parametrize("ids", ["3", ["3"], [3, -1], [None], {"a": 3}])
def test_wrong_suppressed_tokens_are_refused(folder: Path, ids: object) -> None:
    _change(folder / "generation_config.json", {"suppress_tokens": ids})
    with pytest.raises(CheckpointError, match="suppress_tokens as a token id or a list"):
        read_never_sampled_ids(folder)


SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")


@pytest.mark.parametrize("field", [*SIZES, "max_position_embeddings"])
@every_case("size", [-1, "64", 1.5, [4], {}])
def test_a_size_that_is_no_number_is_refused(folder: Path, field: str, size: object) -> None:
    """C11: a CheckpointError, regardless of the library's exception."""
    _change(folder / "config.json", {field: size})
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_facts(EngineConfig(model=str(folder)))


OWN_CODE = """
from pathlib import Path
from transformers import LlamaConfig
Path({marker!r}).touch()

class OwnConfig(LlamaConfig):
    model_type = "own"
"""


@pytest.fixture
def with_own_code(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A folder whose configuration, model and tokenizer are to be loaded by Python files of its own; and their mark."""
    import transformers.dynamic_module_utils

    marker = tmp_path / "its code was run"
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    # To answer 'y' to a question that a library asks is to run the code.
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    auto_map = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}
    _change(folder / "config.json", {"model_type": "own", "auto_map": auto_map})
    return folder, marker


def test_the_code_of_a_checkpoint_is_not_run_and_no_question_is_asked(with_own_code: tuple[Path, Path]) -> None:
    """C11: the error names the flag by which it would be."""
    folder, marker = with_own_code
    with pytest.raises(CheckpointError, match=r"has Python files .* --trust-remote-code"):
        read_facts(EngineConfig(model=str(folder)))
    assert not marker.exists()
    assert sys.stdin.read().startswith("y\n" * 20)


def test_the_code_of_a_trusted_checkpoint_is_run(with_own_code: tuple[Path, Path]) -> None:
    folder, marker = with_own_code
    facts = read_facts(EngineConfig(model=str(folder), trust_remote_code=True))
    assert facts.num_layers == 4
    assert marker.exists()


def test_the_tokenizer_of_the_last_stage_outlives_its_file(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text()
    kept = tokenizer_reader(folder, trust_remote_code=False, now=True)
    (folder / "tokenizer.json").unlink()
    assert kept() == text


def test_the_code_of_a_tokenizer_is_not_run(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = tmp_path / "its code was run"
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    (folder / "own.py").write_text(OWN_CODE.format(marker=str(marker)))
    own = {"auto_map": {"AutoTokenizer": [None, "own.OwnTokenizer"]}, "tokenizer_class": "OwnTokenizer"}
    _change(folder / "tokenizer_config.json", own)
    with contextlib.suppress(CheckpointError):
        load_tokenizer(EngineConfig(model=str(folder)))
    assert not marker.exists()
    assert sys.stdin.read().startswith("y\n" * 20)


def test_a_known_model_needs_none_of_the_code_that_it_brings(with_own_code: tuple[Path, Path]) -> None:
    folder, marker = with_own_code
    _change(folder / "config.json", {"model_type": "qwen3"})
    assert _load(folder).facts.is_last
    assert not marker.exists()


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


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_weight_that_is_not_finite_is_named(folder: Path, value: float) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"][3] = value
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight must be finite .* infinite numbers or NaN"):
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
        ("one of another shape", r"experts\.down_proj has 12 parts, .* must fit together"),
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


@pytest.mark.parametrize(
    "files", [[1], {"a": 5}, {"a": "../model.safetensors"}, {"a": "gone.safetensors"}, {"a": "config.json"}, None]
)
def test_an_index_that_names_no_file_of_its_folder(folder: Path, files: Any) -> None:
    """C11: a name from a file never leads out of its folder."""
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(CheckpointError, match=r"must map each weight to a \*.safetensors file of its folder, got "):
        _load(folder)


@pytest.mark.parametrize(
    "path",
    ["embedded:" + "9" * 400, "embedded:" + "9" * 5000, "/" + "a" * 300, "~nobody-of-this-name/x", "/etc/passwd/x"],
)
def test_a_path_that_no_folder_can_have(path: str) -> None:
    """C11: it was a traceback in the log, and the text of an OSError."""
    for read in (resolve_folder, local_folder):
        with pytest.raises(CheckpointError, match="which is not a folder here; check the path"):
            read(EngineConfig(model=path))
    with pytest.raises(CheckpointError, match="which is not a folder here; check the path"):
        lora_folder(path.replace("embedded", "embedded-lora"))


@pytest.mark.parametrize("kind", ["a pipe", "a device", "a link to itself"])
def test_weights_that_are_no_regular_file(folder: Path, kind: str) -> None:
    """C11: to open a pipe without a writer took the stage, and with it the server, for ever."""
    path = folder / "model.safetensors"
    path.unlink()
    if kind == "a pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "a device" else path)
    with pytest.raises(CheckpointError, match="must be a regular file, not a pipe, a device or a broken link"):
        _load(folder)


def test_a_stage_reads_no_weight_of_another(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    kept = {name: tensor for name, tensor in weights.items() if ".layers.1." in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    config = EngineConfig(model=str(folder), pp_size=4, device="cpu")
    assert not StageRunner(config, limits_for(config, vocab_size=264, num_layers=4), 1).facts.is_last


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
    save_file(
        {name: t for name, t in weights.items() if not name.endswith(("q_norm.weight", "k_norm.weight"))},
        folder / "model.safetensors",
    )
    assert _load(folder).facts.is_last
    with pytest.raises(CheckpointError, match=r"changes hidden states outside its layers.*pp_size=1"):
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
