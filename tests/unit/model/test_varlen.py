"""The backend with one kernel call a layer, with the kernel's documented arithmetic in its place: no GPU is needed.

What is tested is what is ours: the layout of the pool, page tables, lengths, the window's convention, the fall-backs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from chained_stages import ChainedStages, limits_for
from thinned import thinned

from benchmarks.gpu.stand_ins import kernel
from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.model.transfer import packed, sent, unpacked
from engine.model.varlen import AttentionShape, why_not_shape, why_not_varlen

CPU = torch.device("cpu")
TOLERANCE = 1e-4
SHAPE = AttentionShape(torch.bfloat16, heads=4, kv_heads=2, head_dim=16, page_size=4)


@pytest.fixture
def with_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's arithmetic on a CPU, in any type."""
    monkeypatch.setattr("engine.model.varlen.varlen_attn", kernel)
    monkeypatch.setattr("engine.model.stage_model.why_not_varlen", lambda *_, **__: None)


@pytest.mark.parametrize("lean", [False, True])
@pytest.mark.parametrize("family", thinned(["gemma3_two_ropes", "qwen3", "mistral_window"], one_in=3))
@pytest.mark.usefixtures("with_kernel")
def test_both_backends_compute_the_same(family: str, lean: bool, checkpoint_of: Callable[[str], Path]) -> None:
    """B01, B02: chunks, decodes and both in one batch, over pages in no order, with and without a window."""
    config = EngineConfig(model=str(checkpoint_of(family)), device="cpu", page_size=4, kv_sanitizer=True, pp_size=2)
    chains = [
        ChainedStages(config.model_copy(update={"attention_backend": backend}), limits_for(config), lean=lean)
        for backend in ("sdpa", "varlen")
    ]
    assert [chain.runners[0].model.pool.pages_first for chain in chains] == [False, True]
    ids = torch.randint(0, 198, (3, 64), generator=torch.Generator().manual_seed(5)).tolist()
    plans = (
        [(0, ids[0][:9])],
        [(0, ids[0][9:30]), (1, ids[1][:13])],
        [(2, ids[2][:5]), (0, ids[0][30:31]), (1, ids[1][13:14])],
        [(0, ids[0][31:32]), (1, ids[1][14:15]), (2, ids[2][5:6])],
    )
    for plan in plans:
        gathered, called = [chain.logits(*[chain.segment(*part) for part in plan]) for chain in chains]
        torch.testing.assert_close(called, gathered, atol=TOLERANCE, rtol=0)


@pytest.mark.usefixtures("with_kernel")
def test_a_window_is_counted_as_the_kernel_counts_it(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """B02: with one key more in the window the output is another: the comparison above can fail."""

    def one_more(*args: object, window_size: tuple[int, int], **rest: object) -> torch.Tensor:
        return kernel(*args, window_size=(window_size[0] + 1, 0), **rest)  # type: ignore[arg-type]

    config = EngineConfig(
        model=str(checkpoint_of("mistral_window")), device="cpu", page_size=4, attention_backend="varlen"
    )
    ids = list(range(40))
    right = (chain := ChainedStages(config, limits_for(config), lean=False)).logits(chain.segment(0, ids))
    monkeypatch.setattr("engine.model.varlen.varlen_attn", one_more)
    wrong = (chain := ChainedStages(config, limits_for(config), lean=False)).logits(chain.segment(0, ids))
    assert (right - wrong).abs().max() > TOLERANCE


def test_what_the_kernel_cannot_do_is_known_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """B17: another device, type, head, a capped score, a kernel that refuses or is wrong: each has its reason."""
    assert why_not_varlen(CPU, SHAPE) == ("the device is cpu, and the kernel needs CUDA")
    monkeypatch.setattr("engine.model.varlen.varlen_attn", kernel)
    assert why_not_shape(CPU, SHAPE) is None
    assert "not in torch.float32" in str(why_not_shape(CPU, SHAPE._replace(dtype=torch.float32)))
    assert "caps its scores" in str(why_not_shape(CPU, SHAPE._replace(softcap=30.0)))
    assert "not a multiple of 8" in str(why_not_shape(CPU, SHAPE._replace(head_dim=20)))


@pytest.mark.parametrize("wrong", ["raises", "window", "pages"])
def test_a_kernel_that_is_wrong_on_this_device_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A07: the kernel is tried at start, so that a wrong one never answers a request."""

    def broken(*args: object, window_size: tuple[int, int], block_table: torch.Tensor, **rest: object) -> torch.Tensor:
        if wrong == "raises":
            raise RuntimeError("Paged KV cache block size must be divisible by 256")
        if wrong == "window" and window_size[0] >= 0:
            window_size = (window_size[0] + 1, 0)
        table = block_table.flip(1) if wrong == "pages" else block_table
        return kernel(*args, window_size=window_size, block_table=table, **rest)  # type: ignore[arg-type]

    monkeypatch.setattr("engine.model.varlen.varlen_attn", broken)
    reason = str(why_not_shape(CPU, SHAPE))
    assert ("divisible by 256" if wrong == "raises" else "from plain attention") in reason


def test_asking_for_the_kernel_where_there_is_none_is_refused(checkpoint_of: Callable[[str], Path]) -> None:
    """C09: the setting, its value and the remedy."""
    config = EngineConfig(model=str(checkpoint_of("qwen3")), device="cpu", attention_backend="varlen")
    with pytest.raises(CheckpointError, match=r"must be 'sdpa' or 'auto' here, got 'varlen': the device is cpu"):
        ChainedStages(config, limits_for(config))


def test_arrays_travel_as_one_and_arrive_as_they_were() -> None:
    """A02: one buffer, so one copy, and the same numbers in the same shapes."""
    arrays = [np.arange(5), np.zeros(0, np.int64), np.arange(6).reshape(2, 3)]
    flat = packed(arrays, pinned=False)
    assert flat.shape == (11,)
    for parts in (unpacked(flat, arrays), sent(arrays, CPU)):
        assert [part.tolist() for part in parts] == [array.tolist() for array in arrays]
