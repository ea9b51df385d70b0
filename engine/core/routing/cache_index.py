"""A mirror of one engine's prefix cache, built from its KV events: exact while no batch is missing, and bounded.

Pure: the caller receives the batches and requests missing ones again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from engine.core.memory.node import PLAIN, KvKey, page_keys
from engine.core.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored

# 64 million tokens in pages of 16. A mirror that would exceed this starts over.
MAX_KNOWN_PAGES: Final = 2**22
MAX_KNOWN_LORAS: Final = 4096


class Batch(NamedTuple):
    """The published changes of one step: the batch's number, and the time in seconds at which it was sent."""

    number: int
    sent: float
    events: Sequence[CacheEvent]


class CacheMirror:
    """The keys of the pages cached in the ``pool`` and on the ``host``.

    ``next`` is the number of the next batch, ``newest`` the time of the last one. After a restart or a permanent loss
    of batches the mirror has only the pages that entered the cache since.
    """

    def __init__(self, page_size: int) -> None:
        self.pool: set[bytes] = set()
        self.host: set[bytes] = set()
        self.next = 0
        self._page_size = page_size
        self.newest = 0.0

    def take(self, number: int, sent: float, events: Sequence[CacheEvent]) -> range:
        """Take one batch, ``sent`` in seconds. Returns the numbers of the missing batches before it; empty if it is
        taken.

        A batch that was taken before changes nothing. A lower number with a later time comes from a restarted engine.
        """
        if number < self.next and sent > self.newest:
            self.start_over()
        if number > self.next:
            return range(self.next, number)
        if number == self.next:
            self.next, self.newest = number + 1, sent
            for event in events:
                self._take(event)
            if len(self.pool) + len(self.host) > MAX_KNOWN_PAGES:
                self.start_over(self.next)
        return range(0)

    def start_over(self, number: int = 0) -> None:
        """Forget everything before this batch: the engine restarted, or the earlier batches are lost."""
        self.pool.clear()
        self.host.clear()
        self.next = number

    def cached_pages(self, tokens: Sequence[int], kv_key: KvKey = PLAIN) -> int:
        """Count the full pages of a prompt that the engine would find in the pool and, following them, on the host."""
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


class FollowedCache:
    """The mirror of an engine that may restart and whose batches may be lost; usable while ``is_right``.

    Live batches are taken while none is missing. After a gap or a lost connection the caller requests the batches from
    ``wanted`` on, whose first one shows whether the engine restarted. ``versions`` has the engine's version of each
    LoRA, by name.
    """

    def __init__(self, page_size: int) -> None:
        self.mirror = CacheMirror(page_size)
        self.versions: dict[str, int] = {}
        self.is_right = False
        # The number of the newest live batch that arrived while the mirror was not right.
        self._passed_by = -1

    @property
    def wanted(self) -> int:
        """The first batch to request: the newest one taken, which the same engine repeats unchanged."""
        return max(0, self.mirror.next - 1)

    def doubt(self) -> None:
        """Stop using the mirror until the next answer: the connection was lost, and the engine may have restarted."""
        self.is_right = False

    def live(self, batch: Batch) -> bool:
        """Take a published batch unless an earlier one is missing. Returns ``is_right``."""
        if self.is_right:
            self.is_right = not self._take(batch)
        if not self.is_right:
            self._passed_by = max(self._passed_by, batch.number)
        return self.is_right

    def answered(self, first: int, batches: Sequence[Batch]) -> bool:
        """Take the batches that the engine still keeps from ``first`` on. Returns ``is_right``.

        If that is false, request again from ``wanted``: the engine restarted, or published more meanwhile.
        """
        had = self.mirror.next > first
        if had and (not batches or (batches[0].number == first and not self._is_of_this_life(batches[0]))):
            self._start_over(0)
            if first:
                self.is_right = False
                return False
        for batch in batches:
            if self._take(batch):  # The engine no longer keeps the batches before it.
                self._start_over(batch.number)
                self._take(batch)
        self.is_right = self._passed_by < self.mirror.next
        self._passed_by = -1
        return self.is_right

    def cached_pages(self, tokens: Sequence[int], lora: str = "", salt: int = 0) -> int:
        """Count the full pages of a prompt that the engine would find; 0 while the mirror is not right."""
        version = self.versions.get(lora) if lora else 0
        return self.mirror.cached_pages(tokens, (version, salt)) if self.is_right and version is not None else 0

    def _is_of_this_life(self, batch: Batch) -> bool:
        """Return whether the mirror has taken this very batch. Works only for the newest: older times are not kept."""
        return batch.number != self.mirror.next - 1 or batch.sent == self.mirror.newest

    def _start_over(self, number: int) -> None:
        self.mirror.start_over(number)
        self.versions.clear()

    def _take(self, batch: Batch) -> range:
        missing = self.mirror.take(*batch)
        for event in () if missing else batch.events:
            if isinstance(event, PagesStored) and event.lora_name:
                self.versions[event.lora_name] = event.kv_key[0]
        if len(self.versions) > MAX_KNOWN_LORAS:
            self.versions.clear()
        return missing
