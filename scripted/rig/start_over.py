"""Starting over: makes a scheduler as good as new where it stands, between two scripts on one server.

The loop and its gate hold the scheduler, so it cannot be replaced. Production never does this.
"""

from __future__ import annotations

from engine.errors import IntegrityError
from engine.scheduler import Scheduler

__all__ = ["start_over"]


def start_over(scheduler: Scheduler) -> None:
    """Forget everything, counters and digest included. Raises IntegrityError unless the engine is fully idle."""
    if not scheduler.is_fully_idle:
        raise IntegrityError(f"a scheduler that is busy cannot start over: {scheduler.books.what_is_busy()}")
    Scheduler.__init__(scheduler, scheduler.limits)
