"""Weights read by mapping the files, and KV that takes memory where it is written: bytes held after a start."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from chained_stages import ChainedStages, limits_for

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.model import stage_model
from engine.model.file_pages import mapped_places
from engine.model.kv_pool import KVPool

PROMPT = list(range(20, 40))
MIB = 1 << 20


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "qwen2_biased"])
@pytest.mark.parametrize("kind", ["packed", "plain", "by transformers"])
def test_files_may_be_overwritten_once_they_are_read(
    family: str, kind: str, checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update in place writes into the files that a stage has mapped, which must not change what it computes."""
    for path in checkpoint_of(family).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(stage_model, "is_packing_worthwhile", lambda *_: kind == "packed")
    if kind == "by transformers":
        monkeypatch.setattr(stage_model, "why_not_lean", lambda _: "this test says so")
    config = EngineConfig(model=str(tmp_path), device="cpu", page_size=4)
    chain = ChainedStages(config, limits_for(config))
    assert chain.runners[0].model.is_lean is (kind != "by transformers")
    before = chain.logits(chain.segment(0, PROMPT))
    weights = tmp_path / "model.safetensors"
    assert not mapped_places([weights.resolve()], writable=True)
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size // 8)
        file.write(bytes(weights.stat().st_size * 7 // 8))
    assert torch.equal(chain.logits(chain.segment(1, PROMPT)), before)


@pytest.mark.skipif(sys.platform != "linux", reason="only there are huge pages")
def test_a_token_takes_the_memory_of_its_own_slots() -> None:
    """Not a huge page for each head of each layer: those of a large model took 0.9 GiB for the first token."""
    config = EngineConfig(max_total_tokens=16 << 10, device="cpu")
    limits = Limits.of(config, EMBEDDED_FACTS)
    process = psutil.Process()
    before = process.memory_info().rss
    pool = KVPool(limits, layers=8, kv_heads=8, head_dim=64, dtype=torch.float32, device=torch.device("cpu"))
    pool.keys[:, :, 7] = 1
    pool.values[:, :, 7] = 1
    assert process.memory_info().rss - before < 16 * MIB
    assert not pool.keys[:, :, 8].any()
