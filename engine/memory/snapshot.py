"""The prefix tree as plain data: what has to be known of it to go on from a moment in which nobody owns memory.

Owns the types alone; the tree itself makes one and becomes what one says.
"""

from __future__ import annotations

import msgspec

__all__ = ["CachedRun", "TreeSnapshot"]


class CachedRun(msgspec.Struct, frozen=True, array_like=True):
    """One node: ``tokens`` are the ids of its own pages, ``parent`` is the id of the node that they continue."""

    id: int
    parent: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    hit_count: int
    last_used: int


class TreeSnapshot(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """``runs`` are all nodes but the root, parents before children, siblings in order of insertion."""

    root: int
    generation: int
    next_id: int
    tick: int
    runs: tuple[CachedRun, ...]
