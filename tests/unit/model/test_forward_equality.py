"""The paged, chunked, staged forward pass equals transformers' own for every architecture, cut and chunk size."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from chained_stages import DEVICE, ChainedStages, limits_for
from reference_logits import Reference, reference_logits
from thinned import thinned
from tiny_checkpoints import FAMILIES

from engine.core.config import EngineConfig
from engine.core.plan import SamplingSpec

TOLERANCE = 1e-4  # fp32; the largest difference seen was 6e-6
LENGTHS = (31, 18)
DECODES = 4


@pytest.fixture(scope="module")
def reference(checkpoint_of: Callable[[str], Path]) -> Reference:
    return reference_logits(checkpoint_of, max(LENGTHS) + DECODES)


@pytest.mark.parametrize(("chunk", "pp_size"), thinned([(1, 2), (7, 1), (7, 4), (64, 4)], one_in=2))
@pytest.mark.parametrize("family", thinned(FAMILIES, one_in=2))
def test_logits_equal_those_of_transformers(
    family: str, pp_size: int, chunk: int, checkpoint_of: Callable[[str], Path], reference: Reference
) -> None:
    """C11, B02: two rows prefilled side by side in chunks, then decoded as one padded batch."""
    ids, expected = reference(family)
    config = EngineConfig(
        model=str(checkpoint_of(family)), pp_size=pp_size, device=DEVICE, page_size=4, kv_sanitizer=True
    )
    chain = ChainedStages(config, limits_for(config))
    for first in range(0, max(LENGTHS), chunk):
        rows = [row for row in (0, 1) if first < LENGTHS[row]]
        stops = [min(first + chunk, LENGTHS[row]) for row in rows]
        segments = [chain.segment(row, ids[row, first:stop].tolist()) for row, stop in zip(rows, stops, strict=True)]
        _assert_equal(chain.logits(*segments), [expected[row][stop - 1] for row, stop in zip(rows, stops, strict=True)])
    for step in range(DECODES):
        at = [length + step for length in LENGTHS]
        segments = [chain.segment(row, [int(ids[row, at[row]])]) for row in (0, 1)]
        _assert_equal(chain.logits(*segments), [expected[row][at[row]] for row in (0, 1)])


@pytest.mark.parametrize("family", ["qwen3", "mistral_window", "gemma3_two_ropes"])
def test_greedy_tokens_equal_those_of_generate(family: str, checkpoint_of: Callable[[str], Path]) -> None:
    """C11: greedy decoding, token for token."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_of(family), dtype=torch.float32)
    prompt = list(range(20, 50))
    # The end-of-sequence token ends a request in the scheduler, not in the runner.
    model.generation_config.eos_token_id = None
    expected = model.generate(torch.tensor([prompt]), max_new_tokens=16, do_sample=False, pad_token_id=0)
    config = EngineConfig(model=str(checkpoint_of(family)), device=DEVICE)
    chain = ChainedStages(config, limits_for(config))
    assert chain.generate(0, prompt, 16, chunk=7, spec=SamplingSpec(seed=0)) == expected[0, len(prompt) :].tolist()


def test_reduced_precision_stays_close(checkpoint_of: Callable[[str], Path]) -> None:
    """C11: a configured dtype holds for weights, KV and hidden states alike."""
    folder = checkpoint_of("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    prompt = list(range(30))
    config = EngineConfig(model=str(folder), dtype="bfloat16", pp_size=2, device=DEVICE)
    chain = ChainedStages(config, limits_for(config))
    logits = chain.logits(chain.segment(0, prompt))
    with torch.inference_mode():
        expected = model(torch.tensor([prompt])).logits[0, -1]
    assert logits.dtype == torch.bfloat16
    assert torch.nn.functional.cosine_similarity(logits[0].float(), expected.float(), dim=0) > 0.999


def _assert_equal(logits: torch.Tensor, expected: list[torch.Tensor]) -> None:
    difference = float((logits - torch.stack(expected)).abs().max())
    assert difference < TOLERANCE, f"logits differ from transformers' by {difference}"
