"""A page of a stage as bytes, for a transfer to another engine: its KV, and its part of the slot record.

Owns the order of the bytes. The caller decides which page is read or written, and when.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import numpy as np
import torch

from engine.core.errors import StepFailedError
from engine.model.kv_pool import KVPool
from engine.model.page_layout import KVOrigin, PageLayout
from engine.model.slot_record import SlotRecord


class PageImages:
    """Reads and writes pages of ``pool`` and ``record``, from any thread, after earlier launches.

    ``origin`` says which model computes their KV.
    Uses its own stream on a GPU. An image is a tensor of bytes on the host, pinned if there is a GPU.
    """

    def __init__(self, pool: KVPool, record: SlotRecord, *, stage: int, stages: int, origin: KVOrigin | None) -> None:
        self._pool = pool
        self._record = record
        kv = pool.page(0)
        parts = tuple((str(part.dtype).removeprefix("torch."), tuple(part.shape)) for part in kv)
        self._kv_bytes = sum(part.numel() * part.element_size() for part in kv)
        self.image_bytes = self._kv_bytes + sum(part.nbytes for part in record.page(0))
        self.layout = PageLayout(stage, stages, pool.page_size, origin, parts, record.sanitizer_root, self.image_bytes)
        self._stream: torch.cuda.Stream | None = None
        if kv and kv[0].is_cuda:
            self._stream = torch.cuda.Stream(kv[0].device)
            self._stream.wait_stream(torch.cuda.current_stream(kv[0].device))

    def new_image(self) -> torch.Tensor:
        return torch.empty(self.image_bytes, dtype=torch.uint8, pin_memory=self._stream is not None)

    def require(self, pages: tuple[int, ...]) -> None:
        """Raise StepFailedError unless these pages exist."""
        count = self._pool.total_slots // self._pool.page_size
        if min(pages) < 0 or max(pages) >= count:
            raise StepFailedError(f"pages of a transfer must be in 0..{count - 1}, got {pages}; the plan is broken")

    def read(self, page: int, image: torch.Tensor) -> None:
        """Fill ``image`` with a page; complete on return."""
        self._copy(page, image, writes=False)

    def write(self, page: int, image: torch.Tensor) -> None:
        """Fill a page with ``image``; complete on return."""
        self._copy(page, image, writes=True)

    @torch.inference_mode()
    def _copy(self, page: int, image: torch.Tensor, *, writes: bool) -> None:
        kv, start = self._pool.page(page), 0
        with ExitStack() as stack:
            if self._stream is not None:
                stack.enter_context(torch.cuda.stream(self._stream))
            for part in kv:
                inside = part.view(torch.uint8)
                end = start + math.prod(inside.shape)
                outside = image[start:end].view(inside.shape)
                start = end
                if self._stream is not None:
                    inside.copy_(outside, non_blocking=True) if writes else outside.copy_(inside, non_blocking=True)
                # Not with torch, which would start a pool of threads for each thread that copies.
                elif writes:
                    np.copyto(inside.numpy(), outside.numpy())
                else:
                    np.copyto(outside.numpy(), inside.numpy())
        if self._stream is not None:
            self._stream.synchronize()
        rest = image[self._kv_bytes :].numpy()
        for noted in self._record.page(page):
            raw = noted.view(np.uint8)
            said, rest = rest[: raw.size], rest[raw.size :]
            if writes:
                raw[:] = said
            else:
                said[:] = raw
