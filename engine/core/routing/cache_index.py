"""The cache of one engine, as its KV events tell: exact while none is missing, and never more than there is.

Pure: the caller receives the batches, and asks for those again that are missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Final, NamedTuple

from engine.core.memory.node import PLAIN, KvKey, page_keys
from engine.core.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored

# Known of one engine at most, 64 million tokens in pages of 16: an engine that tells of more is forgotten.
MAX_KNOWN_PAGES: Final = 2**22
MAX_KNOWN_LORAS: Final = 4096


class Batch(NamedTuple):
    """The changes of one step, as they were published: their number, and when they were sent, in seconds."""

    number: int
    sent: float
    events: Sequence[CacheEvent]


class CachePicture:
    """``pool`` and ``host`` have the keys of the pages that are cached there; ``next`` is the batch that comes next,
    ``newest`` the time of the one before.

    After a restart, or where batches are lost for good, it knows what has entered since.
    """

    def __init__(self, page_size: int) -> None:
        self.pool: set[bytes] = set()
        self.host: set[bytes] = set()
        self.next = 0
        self._page_size = page_size
        self.newest = 0.0

    def take(self, number: int, sent: float, events: Sequence[CacheEvent]) -> range:
        """Take one batch, sent at a time in seconds. Returns the numbers that must come before it; none if it is taken.

        A batch that was taken before changes nothing. A lower number that was sent later is of an engine that was
        started again.
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


class FollowedCache:
    """The picture of an engine that may die, come back, and be heard with gaps: used while ``is_right``.

    Batches that come live are taken while none is missing. After a gap or a loss of contact an answer to a question is
    needed: the batches from ``wanted`` on, where an engine that was started again gives itself away. ``versions`` are
    the engine's own of the LoRAs, by name.
    """

    def __init__(self, page_size: int) -> None:
        self.picture = CachePicture(page_size)
        self.versions: dict[str, int] = {}
        self.is_right = False
        # The newest batch that came while the picture was not right.
        self._passed_by = -1

    @property
    def wanted(self) -> int:
        """The first batch to ask for: the newest that was taken, which the engine that sent it sends again alike."""
        return max(0, self.picture.next - 1)

    def doubt(self) -> None:
        """Use nothing until the next answer: contact was lost, and the engine may have been started again."""
        self.is_right = False

    def live(self, batch: Batch) -> bool:
        """Take a batch as it is published, unless one before it is missing. Returns ``is_right``."""
        if self.is_right:
            self.is_right = not self._take(batch)
        if not self.is_right:
            self._passed_by = max(self._passed_by, batch.number)
        return self.is_right

    def answered(self, first: int, batches: Sequence[Batch]) -> bool:
        """Take all that the engine keeps from ``first`` on, which was ``wanted``. Returns ``is_right``.

        If that is false, ask again, from ``wanted``: the engine is another one than before, or went on meanwhile.
        """
        had = self.picture.next > first
        if had and (not batches or (batches[0].number == first and not self._is_of_this_life(batches[0]))):
            self._start_over(0)
            if first:
                self.is_right = False
                return False
        for batch in batches:
            if self._take(batch):  # Those before it are kept no more.
                self._start_over(batch.number)
                self._take(batch)
        self.is_right = self._passed_by < self.picture.next
        self._passed_by = -1
        return self.is_right

    def cached_pages(self, tokens: Sequence[int], lora: str = "", salt: int = 0) -> int:
        """How many full pages of a prompt the engine would find; none while that is not known."""
        version = self.versions.get(lora) if lora else 0
        return self.picture.cached_pages(tokens, (version, salt)) if self.is_right and version is not None else 0

    def _is_of_this_life(self, batch: Batch) -> bool:
        """Whether it is a batch that the picture has taken. Only the newest one tells: of others no time is kept."""
        return batch.number != self.picture.next - 1 or batch.sent == self.picture.newest

    def _start_over(self, number: int) -> None:
        self.picture.start_over(number)
        self.versions.clear()

    def _take(self, batch: Batch) -> range:
        missing = self.picture.take(*batch)
        for event in () if missing else batch.events:
            if isinstance(event, PagesStored) and event.lora_name:
                self.versions[event.lora_name] = event.kv_key[0]
        if len(self.versions) > MAX_KNOWN_LORAS:
            self.versions.clear()
        return missing
