"""Every end is reported: a scheduler that drops a request tells its client.

Checked in the step that drops it: at the end of the run, a lost request would look like one that never ends.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Protocol, runtime_checkable

from scripted.core.violation import Violation


@runtime_checkable
class ListsRequests(Protocol):
    """A machine that can list its requests."""

    def open_rids(self) -> Collection[str]:
        """Return the rids of all requests that it will still answer."""
        ...


def check_told(live: Iterable[str], machine: ListsRequests) -> None:
    """Check that a machine still has every request without a terminal reply. Raises Violation."""
    kept = machine.open_rids()
    lost = [rid for rid in live if rid not in kept]
    if lost:
        raise Violation(f"the scheduler has dropped {', '.join(lost)}, and no reply told the client of an end")
