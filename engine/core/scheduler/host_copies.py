"""Copies between the KV cache and host memory: the microbatch that carries them out, and the effect of its result.

The tier itself belongs to the memory (``engine/core/memory/host_tier.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.checkpoint import Checkpoint, CheckpointParts, KeptPage
from engine.core.errors import IntegrityError
from engine.core.memory import HostPage
from engine.core.memory.integrity import check_host
from engine.core.plan import Copies
from engine.core.scheduler.books import Launched
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.request import Request


class HostCopies(Feature):
    """Off for an engine without a host tier."""

    def __init__(self, core: Core) -> None:
        self._books = core.books
        self._counters = core.counters
        self._host = core.memory.host
        self._page_size = core.limits.page_size
        self.is_on = self._host is not None

    def start(self, request: Request) -> None:
        """Count the tokens that were hit on the host: only the new lease holds their pages."""
        assert request.lease is not None, f"{request} has started, but owns no memory"
        if not request.retractions:
            request.cached_tokens_host = len(request.lease.held_pages) * self._page_size
            self._counters.host_hit_tokens += request.cached_tokens_host

    def copies(self) -> Copies | None:
        """Return the copies for the microbatch that is launched now; None if none are due.

        Stages follow microbatches in launch order. So an evicted page is read before this or a later microbatch
        computes in its place, and a loaded page is written before it is used.
        """
        host = self._host
        if host is None or not host.has_due:
            return None
        copies = Copies(*host.launch())
        self._counters.host_pages_written += len(copies.out)
        self._counters.host_pages_loaded += len(copies.into)
        return copies

    def land(self, launched: Launched, *, failed: bool) -> None:
        """Note that copies are back. If the microbatch failed, some stages may not have copied."""
        copies, host = launched.microbatch.copies, self._host
        if copies is not None and host is not None:
            host.land(copies.out, copies.into, failed=failed)

    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of free and ready host pages."""
        assert self._host is not None
        return self._host.pages.free, self._host.pages.cached

    def stats(self) -> dict[str, int]:
        """Return the numbers of all, free and ready host pages."""
        if self._host is None:
            return {}
        pages = self._host.pages
        return {"host_pages_total": pages.total, "host_pages_free": pages.free, "host_pages_cached": pages.cached}

    def check(self, live: Sequence[Request]) -> None:
        """Check that no other use of a page overlaps with a copy in flight."""
        del live
        host = self._host
        if host is None:
            return
        if host.due_in:
            raise IntegrityError(f"pages {host.due_in} are to be loaded from the host, but no microbatch loads them")
        written: list[int] = []
        read: list[int] = []
        for launched in self._books.in_flight:
            copies = launched.microbatch.copies
            if copies is None:
                continue
            written += [number for _, number in copies.out]
            read += [number for number, _ in copies.into]
            held = {page for one in launched.requests if one.lease is not None for page in one.lease.pages}
            if strange := [page for _, page in copies.into if page not in held]:
                raise IntegrityError(
                    f"microbatch {launched.microbatch.id} loads pages {strange}, which none of its requests has"
                )
        check_host(host, written, read)

    def snapshot(self, parts: CheckpointParts) -> None:
        """Add every host page in use, least recently used first."""
        if self._host is not None:
            parts["host"] = tuple([KeptPage(page.number, page.key, page.source) for page in self._host.kept.values()])

    def restore(self, checkpoint: Checkpoint) -> None:
        if self._host is not None:
            self._host.become([
                HostPage(one.number, one.key, one.source, is_ready=one.source is None) for one in checkpoint.host
            ])  # fmt: skip
