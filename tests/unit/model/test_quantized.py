"""Quantized checkpoints: made whole at the load, to the tokens of a dequantized copy, or refused by name (C11)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from chained_stages import ChainedStages, limits_for
from quantized_checkpoints import KINDS, Tensors, compressed, quantized
from safetensors.torch import load_file, save_file
from thinned import thinned
from tiny_checkpoints import ALTERNATING, SHAPE

from engine.core.config import EngineConfig
from engine.core.errors import CheckpointError
from engine.core.plan import SamplingSpec
from engine.model.checkpoint import require_files
from engine.model.quantization import quantization_of
from engine.model.weight_sizes import weight_bytes


def tokens(folder: Path) -> list[int]:
    config = EngineConfig(model=str(folder), pp_size=2, device="cpu")
    stages = ChainedStages(config, limits_for(config), lean=False)
    return stages.generate(0, range(3, 33), 6, chunk=30, spec=SamplingSpec(seed=1))


@pytest.mark.parametrize("kind", thinned(KINDS, one_in=3))
def test_a_quantized_checkpoint_says_what_its_dequantized_copy_says(
    kind: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    kept, made = quantized(kind, checkpoint_of("qwen3"), tmp_path)
    assert tokens(kept) == tokens(made)
    # The files are in fp32, and what was quantized is counted in 16 bits.
    assert weight_bytes(made) * 0.45 < weight_bytes(kept) < weight_bytes(made) * 1.1


def test_experts_are_made_whole_before_they_are_fused(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    kept, made = quantized("fbgemm", checkpoint_of("qwen3_moe"), tmp_path)
    assert tokens(kept) == tokens(made)


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"quant_method": "mxfp4"}, "quant_method='mxfp4': weights of this kind are not served; plain ones are.* fp8"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_algo='NVFP4'"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "load_in_8bit=False, not True"),
        ({"quant_method": "gptq", "bits": 3}, "bits=3, not 2 or 4 or 8"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "checkpoint_format='marlin'"),
        ({"quant_method": "awq", "version": "gemv"}, "version='gemv', not 'gemm'"),
        (compressed("nvfp4-pack-quantized", num_bits=4), "format='nvfp4-pack-quantized'"),
        (compressed("pack-quantized", num_bits=2), "num_bits=2"),
        (compressed("dense") | {"transform_config": {"config_groups": {"r": {}}}}, "transform_config, which rotates"),
        (compressed("dense") | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format='sparse"),
        ({"quant_method": "fp8", "weight_block_size": [0, 1]}, r"cannot be read: .* got \[0, 1\]"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "cannot be read"),
        ({"bits": 4}, "quant_method=None"),
        ("fp8", "must be an object, got 'fp8'"),
    ],
)
def test_a_scheme_that_is_not_served_is_refused_by_name(said: object, text: str) -> None:
    for described in ({"quantization_config": said}, {"text_config": {"compression_config": said}}):
        with pytest.raises(CheckpointError, match=f"config.json .*{text}"):
            quantization_of(described, Path("config.json"))


def test_a_scheme_is_refused_before_a_weight_is_looked_for(
    checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copy(checkpoint_of("qwen3") / "config.json", tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(CheckpointError, match="quant_method='hqq'"):
        require_files(EngineConfig(model=str(tmp_path)))


def test_gguf_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    for model in (tmp_path, file):
        with pytest.raises(CheckpointError, match="GGUF"):
            require_files(EngineConfig(model=str(model)))


def _spoiled(checkpoint: Path, folder: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy with some tensors changed, added, or taken away (None); ``__`` stands for a dot."""
    shutil.copytree(checkpoint, folder)
    kept: dict[str, Any] = load_file(folder / "model.safetensors")
    kept |= {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    plain = {name: tensor for name, tensor in kept.items() if tensor is not None}
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


DOWN = "model__layers__3__mlp__down_proj__"


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        (
            {DOWN + "weight_scale_inv": torch.ones(1, 1)},
            r"Qwen3ForCausalLM has no place for model\.layers\.3.*scale_inv",
        ),
        ({"model__layers__5__mlp__down_proj__weight": torch.ones(1)}, r"no place for model\.layers\.5\."),
        ({DOWN + "weight": torch.zeros(64, 96, dtype=torch.int8)}, "down_proj.weight must be stored as .* stores I8"),
    ],
)
def test_a_weight_without_a_place_is_refused_on_every_stage(
    tensors: Tensors, text: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = _spoiled(checkpoint_of("qwen3"), tmp_path / "spoiled", **tensors)
    with pytest.raises(CheckpointError, match=text):
        tokens(folder)


def test_what_a_model_computes_itself_may_be_kept(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    old = {"model__layers__1__self_attn__rotary_emb__inv_freq": torch.ones(8)}
    folder = _spoiled(checkpoint_of("qwen3"), tmp_path / "old", **old)
    assert tokens(folder) == tokens(checkpoint_of("qwen3"))


def test_scales_that_do_not_fit_are_refused(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    kept, _ = quantized("fp8 blocks", checkpoint_of("qwen3"), tmp_path)
    folder = _spoiled(kept, tmp_path / "spoiled", **{DOWN + "weight_scale_inv": torch.ones(3, 3)})
    with pytest.raises(
        CheckpointError, match=r"weight model\.layers\.3\.mlp\.down_proj\.weight must fit .*scales of shape"
    ):
        tokens(folder)


def test_a_buffer_that_a_checkpoint_keeps_is_used(tmp_path: Path) -> None:
    """A router's correction is no parameter, but trained: without it other experts are chosen."""
    sizes = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "first_k_dense_replace": 1}
    torch.manual_seed(7)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Glm4MoeConfig(**SHAPE, **sizes))
    for layer in model.model.layers[1:]:
        layer.mlp.gate.e_score_correction_bias[:] = torch.arange(8.0)
    model.save_pretrained(tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu")
    (runner,) = ChainedStages(config, limits_for(config), lean=False).runners
    found = [buffer for name, buffer in runner.model._model.named_buffers() if "correction" in name]
    assert len(found) == 4
    assert all(torch.equal(buffer, torch.arange(8.0)) for buffer in found)


@pytest.mark.parametrize("spoiled", [False, True])
def test_the_text_part_of_a_model_that_sees_is_served(tmp_path: Path, spoiled: bool) -> None:
    """Its weights have other names, and the image weights are not needed."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(7)
    config = transformers.Gemma3Config(
        text_config=SHAPE | {"sliding_window": 9, "layer_types": ALTERNATING},
        vision_config=sizes | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
    )
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path / "whole")
    if spoiled:
        kept = load_file(tmp_path / "whole" / "model.safetensors")
        (layer,) = [name for name in kept if name.endswith("layers.3.mlp.down_proj.weight") and "language" in name]
        folder = _spoiled(tmp_path / "whole", tmp_path / "spoiled", **{f"{layer}_scale": torch.ones(1)})
        with pytest.raises(CheckpointError, match=r"has no place for .*layers\.3\.mlp.down_proj\.weight_scale"):
            tokens(folder)
        return
    engine = EngineConfig(model=str(tmp_path / "whole"), device="cpu")
    stages = ChainedStages(engine, limits_for(engine, window=9), lean=False)
    said = stages.generate(0, range(3, 33), 6, chunk=30, spec=SamplingSpec(seed=1, temperature=0))
    prompt = torch.arange(3, 33)[None]
    expected = model.generate(prompt, max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert said == expected[0, 30:].tolist()
