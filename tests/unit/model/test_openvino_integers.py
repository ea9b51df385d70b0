"""Quantized checkpoints on OpenVINO: their own integers give the logits of a dequantized copy (C11)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

pytest.importorskip("openvino")

from chained_stages import ChainedStages, limits_for
from quantized_checkpoints import KINDS, quantized

from engine.core.config import EngineConfig
from engine.core.plan import SamplingSpec
from engine.model.arithmetic import compute_dtype
from engine.model.openvino.graph_cache import default_folder

PROMPT = list(range(20, 51))
KEPT = {
    "compressed int8": "i8",
    "compressed int4": "u4",
    "compressed int4 zeros": "u4",
    "compressed packed int8": "u8",
    "compressed plain zeros": "u8",
    "awq": "u4",
    "gptq": "u4",
    "bitsandbytes": "i8",
}


def tokens_of(folder: Path, backend: str) -> list[int]:
    config = EngineConfig(model=str(folder), device="cpu", page_size=32, backend=backend)
    return ChainedStages(config, limits_for(config)).generate(0, PROMPT, 12, chunk=30, spec=SamplingSpec(seed=1))


def logits_of(folder: Path, backend: str, pp_size: int, dtype: str = "auto") -> torch.Tensor:
    config = EngineConfig(model=str(folder), pp_size=pp_size, device="cpu", page_size=32, backend=backend, dtype=dtype)
    chain = ChainedStages(config, limits_for(config))
    assert {runner.model.backend for runner in chain.runners} == {backend}
    return torch.cat([chain.logits(chain.segment(0, part)).float() for part in (PROMPT[:7], PROMPT[7:])])


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_checkpoint_s_integers_give_what_its_dequantized_copy_gives(
    kind: str, pp_size: int, checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept, made = quantized(kind, checkpoint_of("qwen3"), tmp_path)
    found, wanted = logits_of(kept, "openvino", pp_size), logits_of(made, "torch", pp_size)
    assert float((found - wanted).norm() / wanted.norm()) < 1e-4
    if pp_size == 1:
        assert tokens_of(kept, "openvino") == tokens_of(made, "torch")
    graphs = [path.read_text() for path in default_folder().rglob("stage.xml")]
    assert len(graphs) == pp_size
    # Seven matrices in each of five layers.
    if kind in KEPT:
        assert sum(graph.count(f'element_type="{KEPT[kind]}"') for graph in graphs) >= 35
    else:
        assert not any('element_type="u4"' in graph or 'element_type="i8"' in graph for graph in graphs)


@pytest.mark.skipif(compute_dtype(torch.bfloat16) is not torch.bfloat16, reason="this processor has no bfloat16")
@pytest.mark.parametrize("kind", ["awq", "compressed int8", "fp8 blocks"])
def test_the_same_in_16_bits(
    kind: str, checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kept, made = quantized(kind, checkpoint_of("qwen3"), tmp_path)
    found, wanted = logits_of(kept, "openvino", 2, "bfloat16"), logits_of(made, "torch", 2)
    assert float((found - wanted).norm() / wanted.norm()) < 0.1
    graphs = "".join(path.read_text() for path in default_folder().rglob("stage.xml"))
    assert graphs.count(f'element_type="{KEPT.get(kind, "bf16")}"') >= 35


def test_integers_take_their_own_room(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {}
    for kind in ("fp8 tensor", "awq"):
        (tmp_path / kind).mkdir()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / kind / "cache"))
        kept, _ = quantized(kind, checkpoint_of("qwen3"), tmp_path / kind)
        sizes[kind] = _matrix_bytes(kept)
    assert sizes["awq"] < sizes["fp8 tensor"] / 3


def _matrix_bytes(folder: Path) -> int:
    """The bytes of a kept graph's constants beside embedding and head."""
    logits_of(folder, "openvino", 1)
    (weights,) = default_folder().rglob("stage.bin")
    said = json.loads((folder / "config.json").read_text())
    return weights.stat().st_size - 2 * 4 * said["vocab_size"] * said["hidden_size"]
