"""Copies of a benchmark's checkpoint with quantized layers, in published layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file

__all__ = ["QUANTIZED", "quantize"]

_GROUP: Final = 128
_FP8_LARGEST: Final = 448
_INT8_LARGEST: Final = 127
_INT4_LARGEST: Final = 15
_INT4_BITS: Final = 4
# The places of the values 0 to 7 in an AWQ word.
_AWQ_PLACES: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_Parts = dict[str, torch.Tensor]


def _fp8(weight: torch.Tensor) -> _Parts:
    scale = weight.abs().amax(1, keepdim=True) / _FP8_LARGEST
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _fp8_blocks(weight: torch.Tensor) -> _Parts:
    rows, columns = (size // _GROUP for size in weight.shape)
    blocks = weight.reshape(rows, _GROUP, columns, _GROUP)
    scale = blocks.abs().amax((1, 3)) / _FP8_LARGEST
    values = (blocks / scale[:, None, :, None]).reshape(weight.shape).to(torch.float8_e4m3fn)
    return {"weight": values, "weight_scale_inv": scale}


def _int8(weight: torch.Tensor) -> _Parts:
    scale = weight.abs().amax(1, keepdim=True) / _INT8_LARGEST
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _bitsandbytes(weight: torch.Tensor) -> _Parts:
    largest = weight.abs().amax(1)
    return {"weight": (weight / largest[:, None] * _INT8_LARGEST).round().to(torch.int8), "SCB": largest}


def _int4(weight: torch.Tensor) -> _Parts:
    values, _, scales = _grouped(weight, symmetric=True)
    parts = {"weight_packed": _words(values, range(8)), "weight_scale": scales}
    return parts | {"weight_shape": torch.tensor(weight.shape)}


def _gptq(weight: torch.Tensor) -> _Parts:
    values, zeros, scales = _grouped(weight)
    return {
        "qweight": _words(values, range(8)).t().contiguous(),
        "qzeros": _words((zeros.t() - 1) % (_INT4_LARGEST + 1), range(8)),
        "scales": scales.t().half().contiguous(),
        "g_idx": torch.arange(weight.shape[1], dtype=torch.int32) // _GROUP,
    }


def _awq(weight: torch.Tensor) -> _Parts:
    values, zeros, scales = _grouped(weight)
    return {
        "qweight": _words(values.t(), _AWQ_PLACES),
        "qzeros": _words(zeros.t(), _AWQ_PLACES),
        "scales": scales.t().half().contiguous(),
    }


def _grouped(weight: torch.Tensor, *, symmetric: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 4-bit values, and the zero points and scales [out, groups] of groups of inputs."""
    groups = weight.reshape(len(weight), -1, _GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    if symmetric:
        high = torch.maximum(-low, high)
        low = -high
    scales = (high - low) / _INT4_LARGEST
    zeros = (-low / scales).round().clamp(0, _INT4_LARGEST)
    if symmetric:
        zeros = torch.full_like(zeros, 1 << (_INT4_BITS - 1))
    values = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, _INT4_LARGEST).flatten(1)
    return values, zeros, scales


def _words(values: torch.Tensor, places: Sequence[int]) -> torch.Tensor:
    """Pack values into 32-bit words along the columns; ``places`` are a word's values from its lowest bits up."""
    parts = values.to(torch.int64).reshape(len(values), -1, len(places))
    shifts = torch.arange(len(places)) * _INT4_BITS
    packed = (parts[..., list(places)] << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"strategy": "channel", **weights}, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


# By name: the configuration's fields, and the parts of a weight [out, in].
QUANTIZED: Final[dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], _Parts]]]] = {
    "fp8": (_compressed("float-quantized", num_bits=8, type="float"), _fp8),
    "fp8-blocks": ({"quant_method": "fp8", "weight_block_size": [_GROUP, _GROUP]}, _fp8_blocks),
    "int8": (_compressed("int-quantized", num_bits=8, type="int"), _int8),
    "int4": (_compressed("pack-quantized", num_bits=_INT4_BITS, type="int", group_size=_GROUP), _int4),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, _bitsandbytes),
    "gptq": ({"quant_method": "gptq", "bits": _INT4_BITS, "group_size": _GROUP}, _gptq),
    "awq": ({"quant_method": "awq", "bits": _INT4_BITS, "version": "gemm", "group_size": _GROUP}, _awq),
}


def quantize(plain: Path, kind: str, folder: Path) -> None:
    """Write a copy of a checkpoint into one file, with its layers' matrices quantized."""
    said, parts_of = QUANTIZED[kind]
    shutil.copytree(plain, folder)
    kept: _Parts = {}
    for name, weight in load_file(plain / "model.safetensors").items():
        if ".layers." not in name or weight.dim() != 2:
            kept[name] = weight
            continue
        kept |= {f"{name.removesuffix('weight')}{part}": value for part, value in parts_of(weight.float()).items()}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": said}))
