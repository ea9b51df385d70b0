"""Window layers in a pool of their own: equal to transformers' forward, though what is out of the window is gone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from chained_stages import DEVICE, ChainedStages, limits_for
from reference_logits import Reference, reference_logits
from thinned import thinned
from tiny_checkpoints import WINDOW

from benchmarks.gpu.stand_ins import kernel
from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError, IntegrityError
from engine.core.limits import ModelFacts
from engine.core.plan import SamplingSpec, Segment
from engine.model import capacity
from engine.model.checkpoint import read_model_config, window_layers
from engine.model.runner import StageRunner

FAMILIES = ["mistral_window", "gemma2_softcap", "gemma3_two_ropes"]
TOLERANCE = 1e-4
LENGTHS = (8 * WINDOW + 3, 3 * WINDOW)
DECODES = 2 * WINDOW


@pytest.fixture(scope="module")
def reference(checkpoint_of: Callable[[str], Path]) -> Reference:
    return reference_logits(checkpoint_of, max(LENGTHS) + DECODES)


def chain_of(folder: Path, *, lean: bool = True, **values: object) -> ChainedStages:
    config = EngineConfig(**({"model": str(folder), "device": DEVICE, "page_size": 4, "kv_sanitizer": True} | values))
    return ChainedStages(config, limits_for(config, window=WINDOW), lean=lean)


@pytest.mark.parametrize(("chunk", "pp_size"), thinned([(1, 2), (7, 1), (7, 4), (64, 4)], one_in=2))
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(
    family: str, pp_size: int, chunk: int, checkpoint_of: Callable[[str], Path], reference: Reference
) -> None:
    """B18, C11: two rows, several windows long, in chunks, then decoded on for two windows as one padded batch."""
    ids, expected = reference(family)
    chain = chain_of(checkpoint_of(family), pp_size=pp_size, chunked_prefill_size=chunk)
    for first in range(0, max(LENGTHS), chunk):
        rows = [row for row in (0, 1) if first < LENGTHS[row]]
        stops = [min(first + chunk, LENGTHS[row]) for row in rows]
        segments = [chain.segment(row, ids[row, first:stop].tolist()) for row, stop in zip(rows, stops, strict=True)]
        _assert_equal(chain.logits(*segments), [expected[row][stop - 1] for row, stop in zip(rows, stops, strict=True)])
    for step in range(DECODES):
        at = [length + step for length in LENGTHS]
        segments = [chain.segment(row, [int(ids[row, at[row]])]) for row in (0, 1)]
        _assert_equal(chain.logits(*segments), [expected[row][at[row]] for row in (0, 1)])


@pytest.mark.parametrize("lean", [False, True])
def test_the_lean_forward_reads_the_window_pool_too(
    lean: bool, checkpoint_of: Callable[[str], Path], reference: Reference
) -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    ids, expected = reference("mistral_window")
    chain = chain_of(checkpoint_of("mistral_window"), lean=lean, chunked_prefill_size=9)
    assert chain.runners[0].model.is_lean is lean
    for first in range(0, LENGTHS[0], 9):
        stop = min(first + 9, LENGTHS[0])
        _assert_equal(chain.logits(chain.segment(0, ids[0, first:stop].tolist())), [expected[0][stop - 1]])


@pytest.mark.parametrize("family", ["mistral_window", "gemma3_two_ropes"])
def test_the_kernel_over_page_tables_reads_the_window_pool_too(
    family: str, checkpoint_of: Callable[[str], Path], reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B18: with the kernel's documented arithmetic in its place, chunks and decodes in one batch."""
    monkeypatch.setattr("engine.model.varlen.varlen_attn", kernel)
    monkeypatch.setattr("engine.model.stage_model.why_not_varlen", lambda *_, **__: None)
    ids, expected = reference(family)
    chain = chain_of(checkpoint_of(family), attention_backend="varlen", chunked_prefill_size=7)
    assert chain.runners[0].model.pool.pages_first
    chain.logits(chain.segment(1, ids[1, :7].tolist()))
    for step, first in enumerate(range(0, LENGTHS[0], 7)):
        stop, other = min(first + 7, LENGTHS[0]), 7 + step
        parts = [chain.segment(0, ids[0, first:stop].tolist()), chain.segment(1, ids[1, other : other + 1].tolist())]
        _assert_equal(chain.logits(*parts), [expected[0][stop - 1], expected[1][other]])


def test_layers_that_all_have_a_window_cost_nothing_in_the_page_pool(checkpoint_of: Callable[[str], Path]) -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    pool = chain_of(checkpoint_of("mistral_window")).runners[0].model.pool
    assert pool.window is not None
    assert (pool.keys.numel(), pool.window.keys.shape[0]) == (0, 5)


def test_sanitizer_catches_a_window_page_that_was_given_back_too_early(checkpoint_of: Callable[[str], Path]) -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    chain = chain_of(checkpoint_of("gemma3_two_ropes"), chunked_prefill_size=8)
    spec = SamplingSpec(seed=0)
    chain.forward(Segment("a", 0, 0, tuple(range(8)), 0, (0, 1, 2), False, spec, (0, 1, 2)))
    chain.forward(Segment("b", 1, 0, tuple(range(20, 28)), 0, (3, 4), False, spec, (1, 3)))
    with pytest.raises(IntegrityError, match=r"KV of a \(row 0\) at position .* window page 1 holds the KV of another"):
        chain.forward(Segment("a", 0, 8, (9,), 0, (), True))


def test_a_plan_without_window_pages_fails_its_microbatch_alone(checkpoint_of: Callable[[str], Path]) -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    chain = chain_of(checkpoint_of("gemma3_two_ropes"))
    completion = chain.forward(Segment("a", 0, 0, (1, 2), 0, (0,), True, SamplingSpec(seed=0)))
    assert completion.error is not None
    assert "as many window pages as pages" in completion.error


def test_limits_of_another_window_are_refused(checkpoint_of: Callable[[str], Path]) -> None:
    """A window layer needs and keeps the last tokens alone (B18)."""
    config = EngineConfig(model=str(checkpoint_of("mistral_window")), device=DEVICE, page_size=4)
    with pytest.raises(CheckpointError, match="window layers must see 13 tokens"):
        StageRunner(config, limits_for(config, window=13), 0)


def test_windows_are_read_from_the_configuration(checkpoint_of: Callable[[str], Path]) -> None:
    """B18: uniform, hybrid, none."""
    windows = {family: window_layers(read_model_config(checkpoint_of(family))) for family in ("llama", *FAMILIES)}
    assert windows["llama"] == (0, [False] * 5)
    assert windows["mistral_window"] == (WINDOW, [True] * 5)
    assert windows["gemma3_two_ropes"][0] == WINDOW
    assert len(set(windows["gemma3_two_ropes"][1])) == 2


@pytest.mark.parametrize(
    ("full", "window", "room", "tokens"),
    [(100, 0, 10_000, 100), (60, 40, 1_000, 10), (60, 40, 100_000, 1560), (0, 100, 1_000, 10), (0, 100, 10**6, 2**63)],
)
def test_capacity_gives_window_layers_what_they_can_use_and_the_rest_to_the_others(
    full: int, window: int, room: int, tokens: int
) -> None:
    """B18: at most 2 rows of 6 pages and 3 of a microbatch in flight, in pages of 4."""
    facts = ModelFacts(
        name="m",
        vocab_size=9,
        context_length=1000,
        num_layers=4,
        kv_bytes_per_token=full,
        window_tokens=20 if window else 0,
        window_kv_bytes_per_token=window,
    )
    config = EngineConfig(page_size=4, max_running_requests=2, chunked_prefill_size=8)
    assert min(capacity._tokens_in(room, config, facts), 2**63) == pytest.approx(tokens, abs=110)


def _assert_equal(logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
    difference = float((logits - torch.stack(expected)).abs().max())
    assert difference < TOLERANCE, f"logits differ from transformers' by {difference}"
