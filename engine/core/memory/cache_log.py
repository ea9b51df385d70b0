"""The log of pages that entered and left the prefix cache, by the digest of all tokens up to their end.

The tree and the host tier log their changes here. An engine that publishes no KV events has no log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from engine.core.memory.node import KvKey, page_keys
from engine.core.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored


class CacheLog:
    """``keys`` has the key of each cached page, by page number.

    ``name_of`` returns the name of the LoRA that computed KV, by the first number of its key, unless that is 0.
    """

    def __init__(self, page_size: int) -> None:
        self.keys: dict[int, bytes] = {}
        self.name_of: Callable[[int], str] = str
        self._page_size = page_size
        self._events: list[CacheEvent] = []

    def take(self) -> tuple[CacheEvent, ...]:
        """Return the changes since the last call, in order."""
        events = tuple(self._events)
        self._events.clear()
        return events

    def stored(self, after: int | None, tokens: Sequence[int], pages: Sequence[int], kv_key: KvKey) -> None:
        """Log cached ``pages`` of ``tokens``, below the page ``after`` or at the beginning of a prompt."""
        parent = None if after is None else self.keys[after]
        keys = tuple(page_keys(tokens, self._page_size, kv_key, after=parent))
        self.keys.update(zip(pages, keys, strict=True))
        name = self.name_of(kv_key[0]) if kv_key[0] else ""
        self._events.append(PagesStored(parent=parent, keys=keys, tokens=tuple(tokens), kv_key=kv_key, lora_name=name))

    def removed(self, pages: Sequence[int]) -> None:
        """Log the eviction of ``pages``."""
        self._events.append(PagesRemoved(keys=tuple([self.keys.pop(page) for page in pages])))

    def stored_on_host(self, key: bytes) -> None:
        """Log that a copy of this page is ready on the host."""
        self._events.append(PagesStored(parent=None, keys=(key,), on_host=True))

    def removed_from_host(self, key: bytes) -> None:
        """Log that another page replaced this page on the host."""
        self._events.append(PagesRemoved(keys=(key,), on_host=True))

    def cleared(self) -> None:
        """Log that pool and host are empty."""
        self.keys.clear()
        self._events.append(CacheCleared())
