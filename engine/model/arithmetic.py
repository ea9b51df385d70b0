"""The device and dtype of a stage. Imports no model, because it is used before a model is chosen."""

from __future__ import annotations

import math
from typing import Final

import torch

from engine.core.errors import CheckpointError

# The models for which the lean forward pass is exact: the class of each, by model type.
LEAN_ARCHITECTURES: Final = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def stage_devices(name: str, pp_size: int, gpus: int) -> tuple[int, ...]:
    """Return the GPU number of each stage: its own GPU if there are enough, else the first one, or the named one."""
    _, colon, number = name.partition(":")
    if colon and int(number) >= gpus:
        raise CheckpointError(f"device must be one of the {gpus} GPUs that torch sees, got {name!r}; name one of them")
    if colon:
        return (int(number),) * pp_size
    return tuple(range(pp_size)) if gpus >= pp_size else (0,) * pp_size


def relative_difference(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return an output's distance from the expected one, relative to its norm; 0 or infinity for a norm of 0."""
    difference, norm = float((output - expected).norm()), float(expected.norm())
    if not norm:
        return math.inf if difference else 0.0
    return difference / norm


def compute_dtype(stored: torch.dtype, device_type: str = "cpu") -> torch.dtype:
    """Return the dtype in which to compute with weights that are stored as ``stored``.

    AVX2 has no 16-bit arithmetic: there a product of 32 rows took 8 times as long in bf16 as in fp32.
    """
    widens = device_type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    return torch.float32 if widens else stored
