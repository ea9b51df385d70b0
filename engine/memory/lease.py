"""A lease: what one request owns of the memory, from its admission to its release."""

from __future__ import annotations

from engine.memory.node import Node

__all__ = ["Lease"]


class Lease:
    """What one request owns: a row, pages, and a lock on the node of its cached prefix.

    ``pages`` are in the order of the request's tokens. The first ``cached_pages`` of them belong to the tree, along the
    path to ``node``; the others are held by this lease. ``unsent`` is the index of the first page that the stages'
    page tables do not know yet. With window layers the lease has window pages too, beside its pages from
    ``window_start`` on.
    """

    __slots__ = ("cached_pages", "node", "pages", "released", "rid", "row", "unsent", "window_start")

    def __init__(self, *, rid: str, row: int, pages: list[int], node: Node) -> None:
        self.rid = rid
        self.row = row
        self.pages = pages
        self.cached_pages = len(pages)
        self.node = node
        self.unsent = 0
        self.window_start = 0
        self.released = False

    @property
    def held_pages(self) -> list[int]:
        """The pages that only this lease owns."""
        return self.pages[self.cached_pages :]

    def __repr__(self) -> str:
        return f"Lease({self.rid!r}, row={self.row}, pages={self.pages}, cached_pages={self.cached_pages})"
