"""Copies of a benchmark's checkpoint with quantized layers, in published layouts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
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
# Where an AWQ word keeps the values 0 to 7.
_AWQ_PLACES: Final = (0, 2, 4, 6, 1, 3, 5, 7)
_Parts = dict[str, torch.Tensor]


def _fp8(weight: torch.Tensor) -> _Parts:
    scale = weight.abs().amax(1, keepdim=True) / _FP8_LARGEST
    return {"weight": (weight / scale).to(torch.float8_e4m3fn), "weight_scale": scale}


def _int8(weight: torch.Tensor) -> _Parts:
    scale = weight.abs().amax(1, keepdim=True) / _INT8_LARGEST
    return {"weight": (weight / scale).round().to(torch.int8), "weight_scale": scale}


def _awq(weight: torch.Tensor) -> _Parts:
    groups = weight.reshape(len(weight), -1, _GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scales = (high - low) / _INT4_LARGEST
    zeros = (-low / scales).round().clamp(0, _INT4_LARGEST)
    values = ((groups / scales[..., None]).round() + zeros[..., None]).clamp(0, _INT4_LARGEST).flatten(1)
    return {"qweight": _words(values.t()), "qzeros": _words(zeros.t()), "scales": scales.t().half().contiguous()}


def _words(values: torch.Tensor) -> torch.Tensor:
    parts = values.to(torch.int64).reshape(len(values), -1, len(_AWQ_PLACES))
    shifts = torch.arange(len(_AWQ_PLACES)) * _INT4_BITS
    packed = (parts[..., list(_AWQ_PLACES)] << shifts).sum(-1)
    return torch.where(packed >= 1 << 31, packed - (1 << 32), packed).to(torch.int32)


def _compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"strategy": "channel", **weights}, "format": layout}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": {"group_0": group}}


# By name, what the configuration says, and the parts of a weight [out, in].
QUANTIZED: Final[dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], _Parts]]]] = {
    "fp8": (_compressed("float-quantized", num_bits=8, type="float"), _fp8),
    "int8": (_compressed("int-quantized", num_bits=8, type="int"), _int8),
    "awq": ({"quant_method": "awq", "bits": _INT4_BITS, "version": "gemm", "group_size": _GROUP}, _awq),
}


def quantize(plain: Path, kind: str, folder: Path) -> None:
    """Write a copy of a checkpoint in one file, the matrices of its layers quantized."""
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
