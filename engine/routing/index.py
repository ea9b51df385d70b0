"""What each replica has probably cached: an approximate index of prefixes, bounded for each replica.

It follows what was sent, not what the replica says, so it may be wrong both ways; a wrong entry costs a prefill.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence


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
