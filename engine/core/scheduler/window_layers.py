"""Window layers: the window pages of segments, which are freed once no later token sees them.

The pool itself belongs to the memory (``engine/core/memory/sliding_window.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.checkpoint import Checkpoint, CheckpointParts
from engine.core.errors import IntegrityError
from engine.core.memory import SlidingWindowPool
from engine.core.plan import SegmentShare
from engine.core.scheduler.books import Launched
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature
from engine.core.scheduler.request import Request


class WindowLayers(Feature):
    """Off for a model without window layers."""

    def __init__(self, core: Core) -> None:
        self._memory = core.memory
        self._books = core.books
        self.is_on = core.memory.sliding_window is not None

    @property
    def _pool(self) -> SlidingWindowPool:
        pool = self._memory.sliding_window
        assert pool is not None, "this model has no window layers"
        return pool

    def fill(self, request: Request, first_page: int, share: SegmentShare) -> None:
        """Add the window pages beside the segment's pages."""
        assert request.lease is not None, f"{request} is planned, but owns no memory"
        share["window_pages"] = self._pool.window_pages_of(request.lease, first_page)

    def after_result(self, launched: Launched) -> None:
        """Free the window pages that only this microbatch could still see, also for requests that are not running.

        A later microbatch in flight starts, for the same request, no earlier than the end of this one.
        """
        for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True):
            if request.lease is not None:
                end = request.planned_tokens if segment.drafts else segment.start + len(segment.token_ids)
                self._memory.slide(request.lease, end)

    def sizes(self) -> tuple[int, ...]:
        """Return the numbers of free and cached window pages."""
        pages = self._pool.pages
        return pages.free, pages.cached

    def check(self, live: Sequence[Request]) -> None:
        """Check that nothing in flight can see a window page that its request has freed."""
        del live
        window = self._memory.sliding_window
        if window is None:
            return
        for launched in self._books.in_flight:
            for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True):
                lease, first = request.lease, window.first_page(segment.start)
                if lease is not None and lease.window_start > first:
                    raise IntegrityError(
                        f"microbatch {launched.microbatch.id} sees {request.rid} from page {first} on, but its "
                        f"window pages before index {lease.window_start} are released"
                    )

    def snapshot(self, parts: CheckpointParts) -> None:
        """Add every page that has a window page, with that page, in the order of eviction."""
        window = self._memory.sliding_window
        if window is not None:
            parts["window"] = tuple([(page, window.beside[page]) for page in window.idle])

    def restore(self, checkpoint: Checkpoint) -> None:
        if self._memory.sliding_window is not None:
            self._memory.sliding_window.become(checkpoint.window)
