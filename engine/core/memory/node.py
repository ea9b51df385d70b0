"""A node of the prefix tree, which only the tree changes, and the keys of pages outside the tree."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

# The key of KV: the version of the LoRA that computed it and the key of its cache salt, each 0 without one. Requests
# with equal keys share prefixes; the memory only compares keys.
KvKey = tuple[int, int]
PLAIN: Final[KvKey] = (0, 0)

_KEY_BYTES: Final = 16


@dataclass(slots=True, eq=False)
class Node:
    """A run of full pages, with its token ids and page numbers.

    ``lock_ref`` counts the live requests whose prefix passes through it; ``hit_count`` counts how often a request
    published a path through it: once when its prompt is confirmed and once when it ends, but not for each chunk.
    ``kv_key`` is the key of its KV.
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
        """Return the key among its parent's children: the first page of tokens, after a special ``kv_key``."""
        first = self.tokens[:page_size]
        return (*self.kv_key, *first) if self.kv_key != PLAIN else first

    def __repr__(self) -> str:
        return f"Node({self.id}, pages={self.pages}, lock_ref={self.lock_ref}, hit_count={self.hit_count})"


def page_keys(ids: Sequence[int], page_size: int, kv_key: KvKey, *, after: bytes | None = None) -> Iterator[bytes]:
    """Yield the key of each full page of a prompt: a digest of ``kv_key`` and of all tokens up to the page's end.

    ``after`` is the key of the preceding page, None at the beginning of the prompt.
    """
    key = struct.pack("<qQ", *kv_key) if after is None else after
    for end in range(page_size, len(ids) + 1, page_size):
        page = array("q", ids[end - page_size : end]).tobytes()
        key = blake2b(key + page, digest_size=_KEY_BYTES).digest()
        yield key
