"""Copies between the page pool and the second tier: launched with a microbatch, and known to be done by its result.

It hands the copies that are due to the next microbatch, counts them, and tells the tier what came of them. It decides
nothing.
"""

from __future__ import annotations

from engine.memory import HostTier
from engine.plan import Copies
from engine.scheduler.books import Launched
from engine.scheduler.counters import Counters


class HostCopies:
    """The copies of one engine; without a second tier there are none."""

    def __init__(self, host: HostTier | None, counters: Counters) -> None:
        self._host = host
        self._counters = counters

    def launch(self) -> Copies | None:
        """The copies for the microbatch that is launched now, None when none are due.

        Stages follow microbatches in launch order. So a page that has left the pool is read before what this or a later
        microbatch computes in its place, and a page that is loaded is there before it is used.
        """
        if self._host is None or not self._host.has_due:
            return None
        copies = Copies(*self._host.launch())
        self._counters.host_pages_written += len(copies.out)
        self._counters.host_pages_loaded += len(copies.into)
        return copies

    def land(self, launched: Launched, *, failed: bool) -> None:
        """A microbatch is back, whatever became of its requests. If it failed, some stages may not have copied."""
        copies = launched.microbatch.copies
        if copies is not None and self._host is not None:
            self._host.land(copies.out, copies.into, failed=failed)
