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


def weight() -> torch.Tensor:
    return torch.randn((40, 24), generator=torch.Generator().manual_seed(2))


def logits_of(config: EngineConfig) -> torch.Tensor:
    chain = ChainedStages(config, limits_for(config))
    return torch.cat([chain.logits(chain.segment(0, PROMPT)), chain.logits(chain.segment(0, [7]))])


def test_a_packed_product_equals_the_plain_one() -> None:
    source = weight()
    plain, packed = MatrixProduct(source.t()), MatrixProduct.packed(source)
    assert packed is not None
    source.zero_()  # the next weight is joined in the same memory
    states, expected = torch.ones((5, 40)), weight().t()
    assert relative_difference(packed(ROWS), ROWS @ expected) < 1e-6
    assert relative_difference(packed.added_to(states, ROWS), 1 + ROWS @ expected) < 1e-6
    assert torch.equal(states, torch.ones((5, 40))), "the states that it adds to were written into"
    assert not plain(ROWS).any(), "a plain product is a view of its weight"


def test_a_cpu_that_cannot_pack_is_not_asked_again(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.Tensor] = []

    def refuse(weight: torch.Tensor) -> torch.Tensor:
        asked.append(weight)
        raise RuntimeError("bf16 path needs other instructions")

    config = EngineConfig(model=str(checkpoint_of("qwen3_tied")), device="cpu", page_size=4)
    plain = logits_of(config)
    monkeypatch.setattr(stage_model, "is_packing_worthwhile", lambda *_: True)
    monkeypatch.setattr(matrix_product, "_reordered", refuse)
    assert torch.equal(logits_of(config), plain)
    assert len(asked) == 1


def test_packing_that_changes_the_product_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    reordered = matrix_product._reordered
    monkeypatch.setattr(matrix_product, "_reordered", lambda weight: reordered(weight * 1.1))
    assert MatrixProduct.packed(weight()) is None


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
    packs: list[torch.Tensor] = []
    reordered = matrix_product._reordered
    monkeypatch.setattr(stage_model, "is_packing_worthwhile", lambda *_: True)
    monkeypatch.setattr(matrix_product, "_reordered", lambda weight: packs.append(reordered(weight)) or packs[-1])
    packed = logits_of(config)
    assert len(packs) == 4 * 5 + 1
    assert relative_difference(packed, plain) < 1e-5
