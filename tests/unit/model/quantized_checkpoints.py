"""Small quantized checkpoints in the layouts that the schemes' own libraries write, and plain copies of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
GROUP = 16
# Where an AWQ word keeps the values 0 to 7.
AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def words(values: torch.Tensor, bits: int, places: tuple[int, ...] | None = None) -> torch.Tensor:
    """Values [rows, columns] in words of 32 bits along the columns."""
    count = 32 // bits
    parts = values.to(torch.int64).reshape(len(values), -1, count)
    parts = parts[..., list(places)] if places else parts
    packed = sum(parts[..., place] << (bits * place) for place in range(count))
    assert isinstance(packed, torch.Tensor)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def grouped(weight: torch.Tensor, bits: int, size: int = GROUP) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values from 0 on, zero points and scales [out, groups] of each group of ``size`` inputs."""
    parts = weight.reshape(len(weight), -1, size)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scales = (high - low) / (2**bits - 1)
    zeros = (-low / scales).round().clamp(0, 2**bits - 1)
    values = ((parts / scales[..., None]).round() + zeros[..., None]).clamp(0, 2**bits - 1)
    return values.flatten(1), zeros, scales


def whole(values: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, size: int = GROUP) -> torch.Tensor:
    parts = values.reshape(len(values), -1, size)
    return ((parts - zeros[..., None]) * scales[..., None]).flatten(1)


def fp8(weight: torch.Tensor, scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in 8 bits by scales that spread over the weight, and what they stand for."""
    values = (weight / scales).to(torch.float8_e4m3fn)
    return values, values.float() * scales


def fp8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    rows, columns = weight.shape
    scales = torch.rand(-(-rows // 40), -(-columns // 24)) * 0.01 + 0.001
    values, made = fp8(weight, torch.kron(scales, torch.ones(40, 24))[:rows, :columns])
    return {"weight": values, "weight_scale_inv": scales}, made


def fp8_channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 448
    values, made = fp8(weight, scales)
    return {"weight": values, "weight_scale": scales}, made


def fp8_tensor(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    values, made = fp8(weight, scale)
    return {"weight": values, "weight_scale": scale, "input_scale": torch.tensor(0.5)}, made


def int8_channels(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scales).round()
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * scales


def int8_blocks(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Blocks of two outputs and 32 inputs."""
    rows, columns = weight.shape
    scales = torch.rand(rows // 2, columns // 32) * 0.01 + 0.001
    spread = torch.kron(scales, torch.ones(2, 32))
    values = (weight / spread).round().clamp(-127, 127)
    return {"weight": values.to(torch.int8), "weight_scale": scales}, values * spread


def plain_zeros(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Packed values of 8 bits whose zero points are not packed."""
    kept, made = packed(8, symmetric=False)(weight)
    _, zeros, _ = grouped(weight, 8)
    return kept | {"weight_zero_point": (zeros - 128).to(torch.int8)}, made


def packed(bits: int, *, symmetric: bool) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def make(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        values, zeros, scales = grouped(weight, bits)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        kept = {
            "weight_packed": words(values, bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            kept["weight_zero_point"] = words(zeros.t().contiguous(), bits).t().contiguous()
        return kept, whole(values, zeros, scales)

    return make


def awq(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    values, zeros, scales = grouped(weight, 4)
    kept = {
        "qweight": words(values.t(), 4, AWQ_PLACES),
        "qzeros": words(zeros.t(), 4, AWQ_PLACES),
        "scales": scales.t().contiguous(),
    }
    return kept, whole(values, zeros, scales)


def gptq(bits: int, *, first_format: bool, ordered: bool) -> Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]:
    def make(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = torch.randperm(weight.shape[1]) if ordered else torch.arange(weight.shape[1])
        values, zeros, scales = grouped(weight[:, order], bits)
        made, groups = torch.empty_like(weight), torch.empty(len(order), dtype=torch.int32)
        made[:, order] = whole(values, zeros, scales)
        groups[order] = torch.arange(len(order), dtype=torch.int32) // GROUP
        unordered = torch.empty_like(values)
        unordered[:, order] = values
        stored = (zeros - 1) % 2**bits if first_format else zeros
        kept = {
            "qweight": words(unordered, bits).t().contiguous(),
            "qzeros": words(stored.t().contiguous(), bits),
            "scales": scales.t().contiguous(),
            "g_idx": groups,
        }
        return kept, made

    return make


def bitsandbytes(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = weight.abs().amax(1)
    values = (weight * (127 / largest[:, None])).round()
    kept = {"weight": values.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return kept, values * (largest[:, None] / 127)


def compressed(kept: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "format": kept}
    return {"quant_method": "compressed-tensors", "format": kept, "config_groups": {"group_0": group}}


KINDS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]]] = {
    "fp8 blocks": ({"quant_method": "fp8", "weight_block_size": [40, 24]}, fp8_blocks),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_channels),
    "compressed fp8": (compressed("float-quantized", num_bits=8, type="float", strategy="channel"), fp8_channels),
    "compressed int8": (compressed("int-quantized", num_bits=8, type="int", strategy="channel"), int8_channels),
    "compressed int4": (compressed("pack-quantized", num_bits=4, symmetric=True), packed(4, symmetric=True)),
    "compressed int4 zeros": (compressed("pack-quantized", num_bits=4), packed(4, symmetric=False)),
    "compressed packed int8": (compressed("pack-quantized", num_bits=8), packed(8, symmetric=False)),
    "compressed plain zeros": (compressed("pack-quantized", num_bits=8), plain_zeros),
    "compressed int8 blocks": (
        # Matrices with 64 inputs have as many scales as rows, those with 96 have more.
        compressed("int-quantized", num_bits=8, type="int", strategy="block", block_structure=[2, 32]),
        int8_blocks,
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm", "group_size": GROUP}, awq),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq(4, first_format=True, ordered=False)),
    "gptq ordered 8": (
        {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2"},
        gptq(8, first_format=False, ordered=True),
    ),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, bitsandbytes),
}


def quantized(kind: str, plain: Path, folder: Path) -> tuple[Path, Path]:
    """A quantized copy of a checkpoint, and a plain one of the same weights."""
    said, make = KINDS[kind]
    torch.manual_seed(3)
    kept: Tensors = {}
    made: Tensors = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if ".layers." not in name or weight.dim() != 2:
            kept[name] = made[name] = weight
            continue
        parts, made[name] = make(weight)
        kept |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in parts.items()}
    for name, tensors in (("quantized", kept), ("whole", made)):
        shutil.copytree(plain, folder / name)
        save_file(
            {key: tensor.contiguous() for key, tensor in tensors.items()},
            folder / name / "model.safetensors",
            metadata={"format": "pt"},
        )
    path = folder / "quantized" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
    return folder / "quantized", folder / "whole"
