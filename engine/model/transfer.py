"""Copies a batch's numbers to the device: all in one copy, which the CPU does not wait for.

Owns no memory for longer than a call. Used once a forward, when its batch is built.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["packed", "sent", "unpacked"]


def sent(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> list[torch.Tensor]:
    """The arrays as tensors on the device: on a CPU as they are, on a GPU by one copy without a wait.

    A copy from memory that is not pinned would wait for all that the GPU was given before it.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    return unpacked(packed(arrays, pinned=True).to(device, non_blocking=True), arrays)


def packed(arrays: Sequence[NDArray[np.int64]], *, pinned: bool) -> torch.Tensor:
    """All arrays in one tensor, one after the other. Pinned memory is reused by torch, after the copy out of it."""
    host = torch.empty(sum([array.size for array in arrays]), dtype=torch.int64, pin_memory=pinned)
    np.concatenate([array.ravel() for array in arrays], out=host.numpy())
    return host


def unpacked(flat: torch.Tensor, arrays: Sequence[NDArray[np.int64]]) -> list[torch.Tensor]:
    """The parts of a packed tensor in the shapes of ``arrays``: views, no copies."""
    parts = torch.split(flat, [array.size for array in arrays])
    return [part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]
