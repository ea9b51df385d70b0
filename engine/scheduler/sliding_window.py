"""When window pages are given back: once nothing in flight, and nothing that is still to be planned, can see them.

The memory knows which pages those are; this knows what is in flight. Asked whenever a microbatch is back.
"""

from __future__ import annotations

from engine.errors import IntegrityError
from engine.memory import KVMemory
from engine.scheduler.books import Books, Launched

__all__ = ["check_windows", "slide_windows"]


def slide_windows(landed: Launched, memory: KVMemory) -> None:
    """Give back the window pages that only this microbatch could still see, also of requests that are parked.

    What is in flight behind it for the same request begins where it ended, or later.
    """
    for segment, request in zip(landed.microbatch.segments, landed.requests, strict=True):
        if request.lease is not None:
            memory.slide(request.lease, segment.start + len(segment.token_ids))


def check_windows(books: Books, memory: KVMemory) -> None:
    """Nothing in flight can see a window page that its request has given back. Raises IntegrityError."""
    windows = memory.windows
    if windows is None:
        return
    for launched in books.in_flight:
        for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True):
            lease, first = request.lease, windows.first_page(segment.start)
            if lease is not None and lease.window_start > first:
                raise IntegrityError(
                    f"microbatch {launched.microbatch.id} sees {request.rid} from page {first} on, but its window "
                    f"pages before place {lease.window_start} are given back"
                )
