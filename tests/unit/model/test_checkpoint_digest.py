"""The digest that distinguishes checkpoints without reading their weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.model.checkpoint import checkpoint_digest, resolve_folder


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
    save_file({name: tensors[name] + 1 for name in names[5:]}, folder / "b.safetensors", {"format": "pt"})
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


def test_a_file_that_is_none_is_named(folder: Path) -> None:
    (weights,) = folder.glob("*.safetensors")
    weights.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="that can be read, but"):
        digest(folder)
