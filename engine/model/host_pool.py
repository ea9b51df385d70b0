"""A stage's pages of host memory: the host tier of its KV, and the copies between it and the KV pool.

Owns the bytes. The plan decides which pages are copied, when and where.
"""

from __future__ import annotations

import torch

from engine.core.errors import CheckpointError, StepFailedError
from engine.core.limits import Limits
from engine.core.plan import Copies
from engine.model.kv_pool import KVPool


class HostPool:
    """``limits.host_pages`` pages, each with the KV of all layers of the stage, in the pool's own format.

    With a GPU the memory is pinned, and copies are enqueued on the computing stream, so they run in the plan's order.
    Raises CheckpointError if the memory cannot be allocated.
    """

    def __init__(self, pool: KVPool, limits: Limits) -> None:
        self._pages = limits.host_pages
        self._pool_pages = limits.total_pages
        try:
            self._kept = [
                torch.empty((self._pages, *part.shape), dtype=part.dtype, pin_memory=part.is_cuda)
                for part in pool.page(0)
            ]
        except (RuntimeError, MemoryError) as exc:
            raise CheckpointError(
                f"the KV of {self._pages} pages of {limits.page_size} tokens must fit into host memory, but: {exc}; "
                "lower host_kv_tokens"
            ) from exc

    def carry_out(self, copies: Copies, pool: KVPool) -> None:
        """Copy pages of ``pool`` to the host, then pages of the host to it.

        Raises StepFailedError for a page that does not exist, before any copy.
        """
        for what, numbers, count in (
            ("pages", [page for page, _ in copies.out] + [page for _, page in copies.into], self._pool_pages),
            ("host pages", [host for _, host in copies.out] + [host for host, _ in copies.into], self._pages),
        ):
            if min(numbers) < 0 or max(numbers) >= count:
                raise StepFailedError(f"{what} of copies must be in 0..{count - 1}, got {numbers}; the plan is broken")
        for page, host in copies.out:
            for kept, part in zip(self._kept, pool.page(page), strict=True):
                kept[host].copy_(part, non_blocking=True)
        for host, page in copies.into:
            for kept, part in zip(self._kept, pool.page(page), strict=True):
                part.copy_(kept[host], non_blocking=True)
