"""The files of a checkpoint: what was read of them does not stay in memory."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from resident_pages import resident_kib
from safetensors.torch import save_file

from engine.model import weights
from engine.model.weights import WeightFiles

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="only there are pages given back")
def test_what_was_read_is_given_back_and_can_be_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "_HELD_BYTES", 2 * MIB)
    path = tmp_path.resolve() / "model.safetensors"
    tensors = {f"weight.{number}": torch.full((KIB, KIB), number, dtype=torch.uint8) for number in range(16)}
    save_file(tensors, path)
    shape, largest = torch.Size((KIB, KIB)), 0
    with WeightFiles(tmp_path) as files:
        for name, expected in [*tensors.items(), *tensors.items()]:
            assert torch.equal(files.load((name,), shape).clone(), expected)
            largest = max(largest, resident_kib(path))
    # Of 16 MiB at most three tensors, and what the system maps around a page that is read.
    assert KIB <= largest < 8 * KIB, f"{largest} KiB of {path.name} were in memory at once"
