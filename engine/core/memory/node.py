"""A node of the prefix tree, which the tree alone changes, and the keys of pages outside the tree."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

# Two numbers that tell what KV was computed with and for. A prefix is shared where both are equal; the memory asks no
# more of them. The scheduler's are the version of a LoRA, 0 for the model itself, and the key of a cache salt, 0 for
# none.
KvKey = tuple[int, int]
PLAIN: Final[KvKey] = (0, 0)

_KEY_BYTES: Final = 16


@dataclass(slots=True, eq=False)
class Node:
    """A run of full pages, with its token ids and page numbers.

    ``lock_ref`` counts the live requests whose prefix passes through it; ``hit_count`` how often a request published a
    path through it (once when its prompt is confirmed, once when it ends; the parts of a split prompt do not count).
    ``kv_key`` is what its KV was computed with and for.
    """

    id: int
    generation: int
    tokens: tuple[int, ...]
    pages: list[int]
    parent: Node | None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    lock_ref: int = 0
    hit_count: int = 0
    last_used: int = 0
    kv_key: KvKey = PLAIN

    def key(self, page_size: int) -> tuple[int, ...]:
        """Its key among its parent's children: its first page of tokens, after its ``kv_key`` unless that is plain."""
        first = self.tokens[:page_size]
        return (*self.kv_key, *first) if self.kv_key != PLAIN else first

    def __repr__(self) -> str:
        return f"Node({self.id}, pages={self.pages}, lock_ref={self.lock_ref}, hit_count={self.hit_count})"


def page_keys(ids: Sequence[int], page_size: int, kv_key: KvKey, *, after: bytes | None = None) -> Iterator[bytes]:
    """The key of each full page of a prompt: a digest of its ``kv_key`` and of all tokens up to its end.

    ``after`` is the key of the page before the first one, None at the beginning of the prompt.
    """
    key = struct.pack("<qQ", *kv_key) if after is None else after
    for end in range(page_size, len(ids) + 1, page_size):
        page = array("q", ids[end - page_size : end]).tobytes()
        key = blake2b(key + page, digest_size=_KEY_BYTES).digest()
        yield key
