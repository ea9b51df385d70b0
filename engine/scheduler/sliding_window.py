"""When window pages are given back: once nothing in flight, and nothing that is still to be planned, can see them.

The memory knows which pages those are; this knows what is in flight. Asked whenever a microbatch is back.
"""

from __future__ import annotations

from engine.memory import KVMemory
from engine.scheduler.books import Launched

__all__ = ["slide_windows"]


def slide_windows(landed: Launched, memory: KVMemory) -> None:
    """Give back the window pages that only this microbatch could still see, also of requests that are parked.

    What is in flight after it for the same request begins where it ended, or later.
    """
    for segment, request in zip(landed.microbatch.segments, landed.requests, strict=True):
        if request.lease is not None:
            memory.slide(request.lease, segment.start + len(segment.token_ids))
