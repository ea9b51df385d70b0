"""Nothing grows: an engine that is idle again is as small as it was when it was new.

What is compared is the size of every container that can be reached from the scheduler.
"""

from __future__ import annotations

import functools

from engine.limits import Limits
from engine.scheduler import Scheduler
from scripted.subject.sizes import sizes_of
from scripted.subject.violation import Violation

__all__ = ["check_growth"]


def check_growth(scheduler: Scheduler) -> None:
    """An engine that is idle and flushed is no larger than a new one. Raises Violation that names what has grown."""
    before, now = _when_new(scheduler.limits), sizes_of(scheduler=scheduler)
    grown = [
        f"{path} has {size} entries, in a new engine {before.get(path, 0)}"
        for path, size in now.items()
        if size > before.get(path, 0)
    ]
    if grown:
        raise Violation(f"the engine is idle and flushed, but it has grown: {'; '.join(grown)}")


@functools.lru_cache(maxsize=256)
def _when_new(limits: Limits) -> dict[str, int]:
    return sizes_of(scheduler=Scheduler(limits))
