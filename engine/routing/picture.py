"""What one engine has cached, as its KV events tell: exact while none is missing, and never more than there is.

Pure: the caller receives the batches, and asks for those again that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from engine.memory.node import PLAIN, KvKey, page_keys
from engine.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored


class CachePicture:
    """``pool`` and ``host`` have the keys of the pages that are cached there; ``next`` is the batch that comes next.

    After a restart, or where batches are lost for good, it knows what has entered since.
    """

    def __init__(self, page_size: int) -> None:
        self.pool: set[bytes] = set()
        self.host: set[bytes] = set()
        self.next = 0
        self._page_size = page_size
        self._newest = 0.0

    def take(self, number: int, sent: float, events: Sequence[CacheEvent]) -> range:
        """Take one batch, sent at a time in seconds. Returns the numbers that must come before it; none if it is taken.

        A batch that was taken before changes nothing. A lower number that was sent later is of an engine that was
        started again.
        """
        if number < self.next and sent > self._newest:
            self.start_over()
        if number > self.next:
            return range(self.next, number)
        if number == self.next:
            self.next, self._newest = number + 1, sent
            for event in events:
                self._take(event)
        return range(0)

    def start_over(self, number: int = 0) -> None:
        """Know nothing before this batch: the engine was started again, or those before it are lost."""
        self.pool.clear()
        self.host.clear()
        self.next = number

    def cached_pages(self, tokens: Sequence[int], kv_key: KvKey = PLAIN) -> int:
        """How many full pages of a prompt the engine would find, in the pool and after them on the host."""
        keys = list(page_keys(tokens, self._page_size, kv_key))
        in_pool = len([*takewhile(self.pool.__contains__, keys)])
        return in_pool + len([*takewhile(self.host.__contains__, keys[in_pool:])])

    def _take(self, event: CacheEvent) -> None:
        match event:
            case PagesStored():
                (self.host if event.on_host else self.pool).update(event.keys)
            case PagesRemoved():
                (self.host if event.on_host else self.pool).difference_update(event.keys)
            case CacheCleared():
                self.pool.clear()
                self.host.clear()
