"""The digest that distinguishes checkpoints without reading all of their weights, and the origin of their KV."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.model import checkpoint_files
from engine.model.checkpoint import checkpoint_digest, read_kv_origin, resolve_folder
from engine.model.checkpoint_files import weights_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(resolve_folder(EngineConfig()), tmp_path / "model"))


def digest(folder: Path) -> str:
    return checkpoint_digest(EngineConfig(model=str(folder)))


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_copy_is_the_same_and_so_is_one_in_other_files(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    expected = checkpoint_digest(EngineConfig())
    configure(folder, _name_or_path="/elsewhere", transformers_version="0")
    tensors = load_file(weights)
    names = sorted(tensors)
    save_file({name: tensors[name] for name in names[:5]}, folder / "a.safetensors")
    save_file({name: tensors[name] for name in names[5:]}, folder / "b.safetensors", {"format": "pt"})
    weights.unlink()
    assert digest(folder) == expected


def test_another_model_is_another(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    first, tensors = digest(folder), load_file(weights)
    configure(folder, rope_theta=7.0)
    seen = [first, digest(folder)]
    for changed in (torch.zeros(3, 4), next(iter(tensors.values())).to(torch.bfloat16)):
        save_file(tensors | {next(iter(tensors)): changed}, weights)
        seen.append(digest(folder))
    assert len(set(seen)) == 4


def test_another_value_of_any_weight_is_another_model(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    first, tensors = digest(folder), load_file(weights)
    unnoticed = []
    for name, tensor in tensors.items():
        save_file(tensors | {name: tensor * 1.001}, weights)
        if digest(folder) == first:
            unnoticed.append(name)
    assert not unnoticed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("place", [0, -1])
def test_parts_of_a_large_weight_are_read_at_both_ends(tmp_path: Path, dtype: torch.dtype, place: int) -> None:
    weight = torch.zeros(1, 200_001).to(dtype)
    save_file({"a": torch.ones(3), "large": weight}, tmp_path / "x.safetensors")
    first = weights_digest(tmp_path)
    changed = weight.clone()
    changed[0, place] = 1
    save_file({"a": torch.ones(3), "large": changed}, tmp_path / "x.safetensors")
    assert weights_digest(tmp_path) != first


def test_the_more_weights_there_are_the_less_is_read_of_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model with a hundred thousand experts would take minutes from a disk far away; each weight counts still."""
    monkeypatch.setattr(checkpoint_files, "_MOST_SAMPLES", 40)
    read, pread = list[int](), os.pread

    def counted(file: int, size: int, place: int) -> bytes:
        read.append(size)
        return pread(file, size, place)

    monkeypatch.setattr(os, "pread", counted)
    for count, most in ((2, 16), (4, 10), (30, 1), (80, 1)):
        weights = {str(at): torch.zeros(1, 20_000) for at in range(count)}
        save_file(weights, tmp_path / "x.safetensors")
        read.clear()
        first = weights_digest(tmp_path)
        assert len(read) == count * most
        assert sum(read) == len(read) * 4096
        weights[str(count - 1)][0, 10_000] = 1
        save_file(weights, tmp_path / "x.safetensors")
        assert (weights_digest(tmp_path) != first) is (most == 1)


def test_the_origin_of_kv_names_what_differs(folder: Path) -> None:
    """A partner with another scaling of its rotary angles, or other weights, is told so."""
    config = EngineConfig()
    (weights,) = folder.glob("*.safetensors")
    first = read_kv_origin(folder, config)
    configure(folder, _name_or_path="/elsewhere", transformers_version="0")
    assert read_kv_origin(folder, config) == first
    configure(folder, rope_scaling={"rope_type": "yarn", "factor": 4.0}, quantization_config={"ignore": ["x"] * 999})
    other = read_kv_origin(folder, config)
    assert other.difference(first).startswith("quantization_config of the model must be the same on both engines, got")
    assert max(len(value) for _, value in other.fields) <= 128
    configure(folder, quantization_config=None)
    scaled = read_kv_origin(folder, config)
    save_file({name: tensor * 1.001 for name, tensor in load_file(weights).items()}, weights)
    words = read_kv_origin(folder, config).difference(scaled)
    assert words.startswith("the weights of the model must be the same on both engines, got")
    assert words.endswith("the same revision of the checkpoint, and the same --weights")
    rounded = config.model_copy(update={"weights": "int8", "backend": "openvino"})
    assert read_kv_origin(folder, rounded).weights == f"{read_kv_origin(folder, config).weights} in int8"


def test_a_file_that_is_none_is_named(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="that can be read, but"):
        digest(folder)
