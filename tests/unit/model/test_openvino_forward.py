"""The forward of OpenVINO equals transformers' own, as torch's does: every known family, in chunks, cut into stages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from chained_stages import ChainedStages, limits_for
from reference_logits import Reference, reference_logits
from safetensors.torch import load_file, save_file
from tiny_checkpoints import WINDOW

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.core.plan import SamplingSpec

pytest.importorskip("openvino")

TOLERANCE = 1e-4  # fp32; the largest difference seen was 1e-5
# Longer than two blocks of 32 tokens, and than several windows.
LENGTHS = (75, 27)
DECODES = 14
FAMILIES = ["qwen3", "qwen3_tied", "qwen2_biased", "llama", "mistral_window", "gemma3_two_ropes"]
WINDOWED = ["qwen2_biased", "mistral_window", "gemma3_two_ropes"]


@pytest.fixture(scope="module")
def reference(checkpoint_of: Callable[[str], Path]) -> Reference:
    return reference_logits(checkpoint_of, max(LENGTHS) + DECODES)


def chain_of(folder: Path, *, window: int = 0, **values: object) -> ChainedStages:
    config = EngineConfig(**({"model": str(folder), "backend": "openvino", "kv_sanitizer": True} | values))
    chain = ChainedStages(config, limits_for(config, window=window))
    assert {runner.model.backend for runner in chain.runners} == {"openvino"}
    return chain


def assert_equal(chain: ChainedStages, ids: torch.Tensor, expected: list[torch.Tensor], chunk: int) -> None:
    """Two rows prefilled side by side in chunks, then decoded as one batch."""
    for first in range(0, max(LENGTHS), chunk):
        rows = [row for row in (0, 1) if first < LENGTHS[row]]
        stops = [min(first + chunk, LENGTHS[row]) for row in rows]
        logits = chain.logits(
            *[chain.segment(row, ids[row, first:stop].tolist()) for row, stop in zip(rows, stops, strict=True)]
        )
        assert_close(logits, [expected[row][stop - 1] for row, stop in zip(rows, stops, strict=True)])
    for step in range(DECODES):
        at = [length + step for length in LENGTHS]
        logits = chain.logits(*[chain.segment(row, [int(ids[row, at[row]])]) for row in (0, 1)])
        assert_close(logits, [expected[row][at[row]] for row in (0, 1)])


def assert_close(logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
    difference = float((logits - torch.stack(expected)).abs().max())
    assert difference < TOLERANCE, f"logits differ from transformers' by {difference}"


@pytest.mark.parametrize("pp_size", [1, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_those_of_transformers(
    family: str, pp_size: int, checkpoint_of: Callable[[str], Path], reference: Reference
) -> None:
    """C11, B02: the chunks have a page boundary within, at and beyond their end."""
    ids, expected = reference(family)
    for chunk in (1, 7, 64):
        assert_equal(chain_of(checkpoint_of(family), pp_size=pp_size), ids, expected, chunk)


@pytest.mark.parametrize("pp_size", [1, 2])
@pytest.mark.parametrize("family", WINDOWED)
def test_window_layers_read_their_own_pool(
    family: str, pp_size: int, checkpoint_of: Callable[[str], Path], reference: Reference
) -> None:
    """B18, C11: what is out of the window is overwritten."""
    ids, expected = reference(family)
    chain = chain_of(checkpoint_of(family), pp_size=pp_size, window=WINDOW, chunked_prefill_size=7)
    assert_equal(chain, ids, expected, 7)


def test_a_page_may_be_several_blocks(checkpoint_of: Callable[[str], Path], reference: Reference) -> None:
    ids, expected = reference("qwen3")
    assert_equal(chain_of(checkpoint_of("qwen3"), page_size=64), ids, expected, 40)


@pytest.mark.parametrize("family", ["qwen3", "mistral_window", "gemma3_two_ropes"])
def test_greedy_tokens_equal_those_of_generate(family: str, checkpoint_of: Callable[[str], Path]) -> None:
    """C11: greedy decoding, token for token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=torch.float32)
    prompt = list(range(20, 50))
    # The end-of-sequence token ends a request in the scheduler, not in the runner.
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    chain = chain_of(checkpoint_of(family))
    assert chain.generate(0, prompt, 16, chunk=7, spec=SamplingSpec(seed=0)) == expected[0, len(prompt) :].tolist()


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "AVX2"), reason="the processor has no bf16 arithmetic"
)
def test_reduced_precision_stays_close(checkpoint_of: Callable[[str], Path], reference: Reference) -> None:
    """C11: weights and KV in bfloat16, two stages."""
    ids, expected = reference("llama")
    chain = chain_of(checkpoint_of("llama"), dtype="bfloat16", pp_size=2)
    chain.logits(chain.segment(0, ids[0, :40].tolist()))
    logits = chain.logits(chain.segment(0, ids[0, 40:60].tolist()))
    assert torch.nn.functional.cosine_similarity(logits[0], expected[0][59], dim=0) > 0.999


@pytest.mark.parametrize(("value", "weights"), [(torch.nan, "auto"), (-torch.inf, "int8")])
def test_a_weight_that_is_not_finite_is_refused_each_time(
    value: float, weights: str, checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No graph is kept of it, which would be taken the next time without a look at the weights."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = shutil.copytree(checkpoint_of("qwen3"), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    for _ in range(2):
        with pytest.raises(CheckpointError, match=r"up_proj\.weight must be finite .* infinite numbers or NaN"):
            chain_of(folder, weights=weights)
