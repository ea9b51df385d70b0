"""What each replica has probably cached: an approximate index of prefixes, chains of hashes, bounded for each replica.

It follows what was sent, not what the replica says, so it may be wrong both ways; a wrong entry costs a prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Final


class PrefixIndex:
    """The chunks of each replica. The least recently used are forgotten first, the end of a prefix before the rest.

    ``capacity`` is the most chunks that are kept for one replica.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1 chunk, got {capacity}")
        self._capacity = capacity
        self._chunks: dict[str, OrderedDict[int, None]] = {}
        self._holders: dict[int, list[str]] = {}

    def add(self, replica: str, chain: Sequence[int]) -> None:
        chunks = self._chunks.setdefault(replica, OrderedDict())
        # From the end: the beginning of a prefix is then the last to be forgotten.
        for chunk in reversed(chain):
            if chunk in chunks:
                chunks.move_to_end(chunk)
            else:
                chunks[chunk] = None
                self._holders.setdefault(chunk, []).append(replica)
        while len(chunks) > self._capacity:
            forgotten, _ = chunks.popitem(last=False)
            self._drop_holder(forgotten, replica)

    def forget(self, replica: str) -> None:
        """Forget all of a replica: it was restarted, flushed, or has left."""
        for chunk in self._chunks.pop(replica, ()):
            self._drop_holder(chunk, replica)

    def longest_first(self, chain: Sequence[int]) -> Iterator[tuple[int, Sequence[str]]]:
        """The prefixes of a prompt that any replica holds, longest first: their chunks, and who holds them."""
        for length in range(len(chain), 0, -1):
            holders = self._holders.get(chain[length - 1])
            if holders:
                yield length, holders

    def size(self, replica: str) -> int:
        return len(self._chunks.get(replica, ()))

    def __len__(self) -> int:
        return sum(map(len, self._chunks.values()))

    def _drop_holder(self, chunk: int, replica: str) -> None:
        holders = self._holders[chunk]
        holders.remove(replica)
        if not holders:
            del self._holders[chunk]


# Later chunks are not hashed: a common prefix of this length decides the choice anyway.
MAX_CHUNKS: Final = 512
_HASH_BYTES: Final = 8


def chunk_hashes(prompt: bytes, chunk_bytes: int, namespace: bytes = b"") -> tuple[int, ...]:
    """The chain of a prompt. Prompts of different namespaces (a model, a LoRA) share no prefix.

    The rest that is shorter than a chunk has no hash.
    """
    if chunk_bytes < 1:
        raise ValueError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    before = blake2b(namespace, digest_size=_HASH_BYTES).digest()
    chain: list[int] = []
    for end in range(chunk_bytes, min(len(prompt), MAX_CHUNKS * chunk_bytes) + 1, chunk_bytes):
        before = blake2b(before + prompt[end - chunk_bytes : end], digest_size=_HASH_BYTES).digest()
        chain.append(int.from_bytes(before, "big"))
    return tuple(chain)
