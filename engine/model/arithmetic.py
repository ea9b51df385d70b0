"""What this processor computes in. Imports no model: it is asked before one is chosen."""

from __future__ import annotations

import torch

__all__ = ["compute_dtype"]


def compute_dtype(stored: torch.dtype) -> torch.dtype:
    """What to compute in when weights are stored as ``stored``.

    AVX2 has no 16-bit arithmetic: there a product of 32 rows took 8 times as long in bf16 as in fp32.
    """
    return torch.float32 if torch.backends.cpu.get_cpu_capability() == "AVX2" else stored
