"""The lean forward: which models take it, that it equals transformers' own, and that a difference is noticed."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from chained_stages import ChainedStages, limits_for
from tiny_checkpoints import SHAPE

from engine.core.config import EngineConfig
from engine.core.errors import StepFailedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.plan import SamplingSpec
from engine.model import fused_decoder as lean
from engine.model.arithmetic import compute_dtype, relative_difference
from engine.model.fused_decoder import LeanDecoder, why_not_lean

PROMPT = list(range(20, 61))


def chain_of(folder: Path, *, lean: bool = True, **values: object) -> ChainedStages:
    config = EngineConfig(model=str(folder), device="cpu", page_size=4, **values)  # type: ignore[arg-type]
    return ChainedStages(config, limits_for(config), lean=lean)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("qwen3", True),
        ("qwen3_tied", True),
        ("qwen2_biased", True),
        ("llama", True),
        ("mistral_window", True),
        ("gemma2_softcap", False),
        ("gemma3_two_ropes", False),
    ],
)
def test_known_architectures_are_lean_on_every_stage(
    family: str, expected: bool, checkpoint_of: Callable[[str], Path]
) -> None:
    chain = chain_of(checkpoint_of(family), pp_size=2)
    assert [runner.model.is_lean for runner in chain.runners] == [expected] * 2


def test_the_embedded_model_is_lean() -> None:
    config = EngineConfig(device="cpu", context_length=256)
    assert ChainedStages(config, Limits.of(config, EMBEDDED_FACTS)).runners[0].model.is_lean


@pytest.mark.parametrize("family", ["qwen3", "qwen3_tied", "qwen2_biased", "llama", "mistral_window"])
def test_logits_equal_those_of_the_transformers_path(family: str, checkpoint_of: Callable[[str], Path]) -> None:
    """C11: a chunk, a chunk beside a decode, and a padded batch of decodes."""
    chains = [chain_of(checkpoint_of(family), lean=lean) for lean in (True, False)]
    assert [chain.runners[0].model.is_lean for chain in chains] == [True, False]
    outputs = []
    for chain in chains:
        steps = [
            chain.logits(chain.segment(0, PROMPT)),
            chain.logits(chain.segment(1, PROMPT[:7]), chain.segment(0, [5])),
            chain.logits(chain.segment(0, [6]), chain.segment(1, [7])),
        ]
        outputs.append(torch.cat(steps))
    assert float((outputs[0] - outputs[1]).abs().max()) < 1e-4


def test_greedy_tokens_equal_those_of_the_transformers_path(checkpoint_of: Callable[[str], Path]) -> None:
    chains = [chain_of(checkpoint_of("qwen2_biased"), lean=lean) for lean in (True, False)]
    one, two = (chain.generate(0, PROMPT, 24, chunk=9, spec=SamplingSpec(seed=0)) for chain in chains)
    assert one == two


@pytest.mark.parametrize("pp_size", [1, 2])
def test_the_last_layer_computes_only_what_is_read(
    pp_size: int, checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its attention: one row a token that is chosen, none for a chunk that chooses none."""
    chain = chain_of(checkpoint_of("qwen3"), pp_size=pp_size)
    rows: list[int] = []
    norm_of = lean._Norm.__call__

    def counted(norm: lean._Norm, states: torch.Tensor) -> torch.Tensor:
        rows.append(len(states))
        return norm_of(norm, states)

    monkeypatch.setattr(lean._Norm, "__call__", counted)
    seen = []
    for segments in [(0, PROMPT[:30], False), (0, PROMPT[30:], True)]:
        row, ids, emits = segments
        chain.logits(chain.segment(row, ids, emits=emits), *([chain.segment(1, [5, 6])] if emits else []))
        seen.append(rows[-3:])
        rows.clear()
    # Of the last layer: queries and keys, what its MLP reads, what the head reads.
    assert seen == [[30, 0, 0], [13, 2, 2]]


def test_angles_are_computed_on_for_positions_beyond_the_first_table(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoint_of("llama")
    chain = chain_of(folder)
    monkeypatch.setattr(lean, "_FIRST_ANGLES", 1)
    grown = chain_of(folder)
    assert torch.equal(grown.logits(grown.segment(0, PROMPT)), chain.logits(chain.segment(0, PROMPT)))


def test_a_forward_that_differs_is_not_taken(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder, right = checkpoint_of("llama"), LeanDecoder.forward
    monkeypatch.setattr(LeanDecoder, "forward", lambda *arguments: right(*arguments) * 1.001)
    with caplog.at_level(logging.WARNING, logger="engine.model.stage_model"):
        wrong = chain_of(folder)
    assert not wrong.runners[0].model.is_lean
    assert "the lean forward pass differs by 0.001" in caplog.text
    monkeypatch.undo()
    plain = chain_of(folder, lean=False)
    difference = wrong.logits(wrong.segment(0, PROMPT)) - plain.logits(plain.segment(0, PROMPT))
    assert float(difference.abs().max()) < 1e-4


def test_an_output_of_zeros_is_compared_too(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    """An untrained model outputs zeros: 0 / 0 counts as no difference."""
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint_of("llama"))
    torch.nn.init.zeros_(model.lm_head.weight)
    model.save_pretrained(tmp_path)
    assert chain_of(tmp_path).runners[0].model.is_lean


@pytest.mark.parametrize(
    ("output", "expected", "difference"),
    [(0.0, 0.0, 0.0), (1.0, 0.0, math.inf), (3.0, 2.0, 0.5), (math.nan, 0.0, math.inf)],
)
def test_a_difference_is_a_part_of_what_was_expected(output: float, expected: float, difference: float) -> None:
    assert relative_difference(torch.tensor([output]), torch.tensor([expected])) == difference


def test_a_forward_that_fails_is_not_taken(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> torch.Tensor:
        raise StepFailedError("no such kernel")

    monkeypatch.setattr(LeanDecoder, "forward", fail)
    with caplog.at_level(logging.WARNING, logger="engine.model.stage_model"):
        chain = chain_of(checkpoint_of("llama"))
    assert not chain.runners[0].model.is_lean
    assert "no such kernel" in caplog.text


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"attention_bias": True}, "projections have biases"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope_type is 'dynamic'"),
    ],
)
def test_what_the_lean_forward_does_not_know_is_refused(values: dict[str, object], text: str) -> None:
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE, **values))
    assert text in str(why_not_lean(model))


@pytest.mark.parametrize(("capability", "expected"), [("AVX2", torch.float32), ("AVX512", torch.bfloat16)])
def test_bf16_is_computed_in_fp32_where_the_cpu_cannot(
    capability: str, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch, checkpoint_of: Callable[[str], Path]
) -> None:
    """The KV and what leaves the stage stay in the configured type."""
    monkeypatch.setattr("torch.backends.cpu.get_cpu_capability", lambda: capability)
    assert compute_dtype(torch.bfloat16) == expected
    assert compute_dtype(torch.bfloat16, "cuda") == torch.bfloat16
    chain = chain_of(checkpoint_of("qwen3"), dtype="bfloat16")
    assert chain.runners[0].model.is_lean
    assert chain.logits(chain.segment(0, PROMPT)).dtype == torch.bfloat16
    assert chain.runners[0].model.pool.keys.dtype == torch.bfloat16
