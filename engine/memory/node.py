"""A node of the prefix tree: a run of full pages, with its locks and hits. The tree alone changes it."""

from __future__ import annotations

__all__ = ["Node"]


class Node:
    """A run of full pages. ``tokens`` is the run's token ids, ``pages`` its page numbers.

    ``lock_ref`` counts the live requests whose prefix passes through it; ``hit_count`` how often a request published a
    path through it (once when its prompt is confirmed, once when it ends; the parts of a split prompt do not count).
    """

    __slots__ = ("children", "generation", "hit_count", "id", "last_used", "lock_ref", "pages", "parent", "tokens")

    def __init__(
        self,
        id: int,  # noqa: A002
        generation: int,
        tokens: tuple[int, ...],
        pages: list[int],
        parent: Node | None,
    ) -> None:
        self.id = id
        self.generation = generation
        self.tokens = tokens
        self.pages = pages
        self.parent = parent
        self.children: dict[tuple[int, ...], Node] = {}
        self.lock_ref = 0
        self.hit_count = 0
        self.last_used = 0

    def __repr__(self) -> str:
        return f"Node({self.id}, pages={self.pages}, lock_ref={self.lock_ref}, hit_count={self.hit_count})"
