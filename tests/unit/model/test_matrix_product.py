"""Packed products: equal to plain ones, taken by a whole stage, and left alone where the CPU cannot pack."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chained_stages import ChainedStages, limits_for

from engine.core.config import EngineConfig
from engine.model import matrix_product, stage_model
from engine.model.arithmetic import relative_difference
from engine.model.matrix_product import MatrixProduct, is_packing_worthwhile

PROMPT = list(range(20, 61))
ROWS = torch.randn((5, 24), generator=torch.Generator().manual_seed(1))


def product() -> MatrixProduct:
    return MatrixProduct(torch.randn((24, 40), generator=torch.Generator().manual_seed(2)))


def logits_of(config: EngineConfig) -> torch.Tensor:
    chain = ChainedStages(config, limits_for(config))
    return torch.cat([chain.logits(chain.segment(0, PROMPT)), chain.logits(chain.segment(0, [7]))])


def test_a_packed_product_equals_the_plain_one() -> None:
    plain, packed = product(), product()
    assert packed.pack()
    assert packed.is_packed
    assert not plain.is_packed
    states = torch.ones((5, 40))
    assert relative_difference(packed(ROWS), plain(ROWS)) < 1e-6
    assert relative_difference(packed.added_to(states, ROWS), plain.added_to(states, ROWS)) < 1e-6
    assert torch.equal(states, torch.ones((5, 40))), "the states that it adds to were written into"


def test_packing_twice_changes_nothing() -> None:
    packed = product()
    assert packed.pack()
    before = packed(ROWS)
    assert packed.pack()
    assert torch.equal(packed(ROWS), before)


def test_a_cpu_that_cannot_pack_keeps_the_plain_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(weight: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("bf16 path needs other instructions")

    plain, kept = product(), product()
    monkeypatch.setattr(matrix_product, "_reordered", refuse)
    assert not kept.pack()
    assert torch.equal(kept(ROWS), plain(ROWS))


def test_packing_that_changes_the_product_is_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, kept, reordered = product(), product(), matrix_product._reordered
    monkeypatch.setattr(matrix_product, "_reordered", lambda weight: reordered(weight * 1.1))
    assert not kept.pack()
    assert torch.equal(kept(ROWS), plain(ROWS))


@pytest.mark.parametrize(
    ("dtype", "device", "threads", "expected"),
    [
        (torch.bfloat16, "cpu", 1, True),
        (torch.float32, "cpu", 1, False),
        (torch.float32, "cpu", 2, True),
        (torch.float64, "cpu", 2, False),
        (torch.bfloat16, "cuda", 2, False),
    ],
)
def test_what_is_packed(dtype: torch.dtype, device: str, threads: int, expected: bool) -> None:
    assert is_packing_worthwhile(dtype, torch.device(device), threads) is expected


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "qwen2_biased"])
def test_a_stage_with_packed_weights_gives_the_same_logits(
    family: str, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(model=str(checkpoint_of(family)), device="cpu", page_size=4)
    plain = logits_of(config)
    packs: list[bool] = []
    right = MatrixProduct.pack
    monkeypatch.setattr(stage_model, "is_packing_worthwhile", lambda *_: True)
    monkeypatch.setattr(matrix_product.MatrixProduct, "pack", lambda self: packs.append(right(self)) or packs[-1])
    packed = logits_of(config)
    assert packs
    assert all(packs)
    assert relative_difference(packed, plain) < 1e-5
