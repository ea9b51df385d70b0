"""Copies numbers between host and device without making the CPU wait: a batch in one copy, and the results back.

Owns memory only during a call or a copy in flight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

# Each value in a copy has 8 bytes: integers, and the bits of floats.
_FLOATS: Final = np.dtype(np.float64)


def sent(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Return arrays of int64 or float64 as tensors on the device; for a GPU with one asynchronous copy.

    A copy from unpinned memory would wait for all earlier work of the GPU.
    """
    if device.type != "cuda":
        return [torch.from_numpy(array).to(device) for array in arrays]
    return unpacked(packed(arrays, pinned=True).to(device, non_blocking=True), arrays)


def packed(arrays: Sequence[NDArray[Any]], *, pinned: bool) -> torch.Tensor:
    """Pack all arrays into one tensor, one after the other. Torch reuses pinned memory after the copy out of it."""
    host = torch.empty(sum([array.size for array in arrays]), dtype=torch.int64, pin_memory=pinned)
    np.concatenate([array.ravel().view(np.int64) for array in arrays], out=host.numpy())
    return host


def unpacked(flat: torch.Tensor, arrays: Sequence[NDArray[Any]]) -> list[torch.Tensor]:
    """Return the parts of a packed tensor in the shapes and types of ``arrays``: views, no copies."""
    parts = torch.split(flat, [array.size for array in arrays])
    return [
        (part.view(torch.float64) if array.dtype == _FLOATS else part).view(array.shape)
        for part, array in zip(parts, arrays, strict=True)
    ]


class Fetch:
    """Tensors on their way from a device to the host, in the order of its work; on a CPU they are already there.

    They may be freed, but not written outside that order.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._here = list(tensors)
        self._event: torch.cuda.Event | None = None
        if device.type == "cuda" and tensors:
            self._here = [torch.empty(part.shape, dtype=part.dtype, pin_memory=True) for part in tensors]
            for here, part in zip(self._here, tensors, strict=True):
                here.copy_(part, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> list[torch.Tensor]:
        """Wait and return the tensors on the host. Raises RuntimeError for an error on the device."""
        if self._event is not None:
            self._event.synchronize()
        return self._here
