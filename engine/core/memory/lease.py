"""A lease: one request's share of the memory, from its admission to its release."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.core.memory.node import PLAIN, KvKey, Node


@dataclass(slots=True, eq=False, kw_only=True)
class Lease:
    """A row, pages, and a lock on the node of the cached prefix, all owned by one request.

    ``pages`` are in the order of the request's tokens. The first ``cached_pages`` of them belong to the tree, along the
    path to ``node``; the others are held by this lease. ``unsent`` is the index of the first page that the stages'
    page tables lack. With window layers the lease has window pages too, beside its pages from ``window_start`` on.
    ``kv_key`` is the key of its KV.
    """

    rid: str
    row: int
    pages: list[int]
    cached_pages: int = field(init=False)
    node: Node
    unsent: int = 0
    window_start: int = 0
    released: bool = False
    kv_key: KvKey = PLAIN

    def __post_init__(self) -> None:
        self.cached_pages = len(self.pages)

    @property
    def held_pages(self) -> list[int]:
        """Return the pages that only this lease owns."""
        return self.pages[self.cached_pages :]

    def __repr__(self) -> str:
        return f"Lease({self.rid!r}, row={self.row}, pages={self.pages}, cached_pages={self.cached_pages})"
