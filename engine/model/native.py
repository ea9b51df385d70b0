"""Paged attention whose decodes are one compiled call a layer: keys are read where they lie, nothing is gathered.

For CPUs. Prompts, and what the kernel cannot, are computed by the eager backend that it extends. Called once a layer.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, Final

import torch

from engine.model.attention import LayerAttention, StageAttention
from engine.model.batch import AttentionGroup
from engine.model.native_build import native_library

__all__ = ["NativeAttention", "NativeKernels"]

_NO_WINDOW: Final = 0
_NAMES: Final = {torch.float32: "attend_float32", torch.bfloat16: "attend_bfloat16"}


class NativeKernels:
    """The compiled kernels for heads of one size. Raises NativeUnavailableError where they cannot be had."""

    def __init__(self, folder: Path, head_size: int) -> None:
        library = native_library(folder, head_size)
        self._attend: dict[torch.dtype, Any] = {}
        for dtype, name in _NAMES.items():
            function = getattr(library, name)
            function.argtypes = [
                *[ctypes.c_void_p, ctypes.c_int64, *[ctypes.c_void_p] * 5],
                *[*[ctypes.c_int64] * 6, ctypes.c_float],
            ]
            function.restype = None
            self._attend[dtype] = function

    def takes(self, query: torch.Tensor, pool: torch.Tensor) -> bool:
        """True for queries in fp32 over a pool in fp32 or bf16."""
        return query.dtype == torch.float32 and pool.dtype in self._attend

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        group: AttentionGroup,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """One query a row: query [rows, heads, size] over keys and values [kv heads, slots, size], to query's shape."""
        rows, heads, size = query.shape
        if query.stride()[1:] != (size, 1):
            query = query.contiguous()
        output = torch.empty(query.shape)
        self._attend[keys.dtype](
            query.data_ptr(),
            query.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            group.slots.data_ptr(),
            group.lengths.data_ptr(),
            output.data_ptr(),
            rows,
            heads,
            keys.shape[0],
            group.keys,
            keys.stride(0),
            window or _NO_WINDOW,
            scale,
        )
        return output


class NativeAttention(LayerAttention):
    """``LayerAttention`` whose groups of one query a row go to the kernel."""

    def __init__(self, stage: StageAttention, layer: int, kernels: NativeKernels, *, windowed: bool = False) -> None:
        super().__init__(stage, layer, windowed=windowed)
        self._kernels = kernels

    def _attend(
        self, query: torch.Tensor, group: AttentionGroup, *, scale: float, window: int | None, softcap: float | None
    ) -> torch.Tensor:
        if group.queries > 1 or softcap is not None or not self._kernels.takes(query, self._keys):
            return super()._attend(query, group, scale=scale, window=window, softcap=softcap)
        return self._kernels.attend(query, self._keys, self._values, group, scale=scale, window=window)
