"""What changed in the memory since its audit last looked: the leases and nodes that it has to look at again.

Nothing is noted until an audit asks for it, so an engine that nobody audits pays one test a change.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from engine.memory.lease import Lease
from engine.memory.node import Node

__all__ = ["Changes"]

# An audit that comes so seldom that more than this was noted must look at everything.
_NOTES_LIMIT: Final = 4096


class Changes:
    """Notes for one audit. ``splits`` are pairs of the new upper half and the lower half, in order."""

    __slots__ = ("leases", "nodes", "on", "splits")

    def __init__(self) -> None:
        self.on = False
        self.leases: deque[Lease] = deque(maxlen=_NOTES_LIMIT)
        self.nodes: deque[Node] = deque(maxlen=_NOTES_LIMIT)
        self.splits: deque[tuple[Node, Node]] = deque(maxlen=_NOTES_LIMIT)

    @property
    def overflowed(self) -> bool:
        """True when notes may have been lost."""
        return len(self.nodes) == _NOTES_LIMIT or len(self.leases) == _NOTES_LIMIT or len(self.splits) == _NOTES_LIMIT

    def clear(self) -> None:
        """Forget what was noted; the audit has seen it."""
        self.leases.clear()
        self.nodes.clear()
        self.splits.clear()
