"""The sizes of an engine that is idle and flushed, as they are digested."""

from __future__ import annotations

from engine.scheduler import Scheduler
from engine.scheduler.sizes import sizes_of
from scripted.core.violation import Violation


def check_sizes(scheduler: Scheduler) -> None:
    """The sizes that are in the digest of each step, of an idle and flushed engine. Raises Violation."""
    limits = scheduler.limits
    window = (limits.window_pages, 0) if limits.window_tokens else ()
    host = (limits.host_pages, 0) if limits.host_pages else ()
    sizes = (0, 0, 0, limits.total_pages, 0, limits.rows, *window, *host)
    digested = sizes_of(scheduler.books, scheduler.memory)
    if digested != sizes:
        raise Violation(f"the sizes of an idle engine are digested as {digested}, but they are {sizes}")
