"""A mirror of a cache made of its KV events: right after gaps and restarts, and never too large."""

from __future__ import annotations

import random

from engine.core.memory import KVMemory
from engine.core.memory.cache_log import CacheLog
from engine.core.memory.node import page_keys
from engine.core.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from engine.core.routing.cache_index import Batch, CacheMirror, FollowedCache

SIZE, PAGES, BATCHES, KEPT = 4, 24, 10_000, 50


class Engine:
    """A memory with requests, and its published batches; the last ``KEPT`` batches can be requested again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.restart()

    def restart(self) -> None:
        log = CacheLog(SIZE)
        self.memory = KVMemory(total_pages=PAGES, page_size=SIZE, rows=4, radix_cache=True, log=log)
        self.sent: list[tuple[CacheEvent, ...]] = []

    def step(self) -> tuple[int, tuple[CacheEvent, ...]]:
        """Run a request, an eviction or a flush, until a batch is published."""
        log = self.memory.log
        assert log is not None
        while not (events := log.take()):
            kind = self._rng.random()
            if kind < 0.01:
                self.memory.reset()
            elif kind < 0.2:
                self.memory.tree.evict(self._rng.randrange(1, 5))
            else:
                ids = [self._rng.randrange(2) for _ in range(self._rng.randrange(4, 30))]
                key = (0, self._rng.choice((0, 0, 7)))
                lease = self.memory.admit("r", ids, spare_pages=0, kv_key=key)
                if lease is not None and self.memory.extend(lease, len(ids)):
                    self.memory.publish(lease, ids, counts=True)
                if lease is not None:
                    self.memory.release(lease)
        self.sent.append(events)
        return len(self.sent) - 1, events

    @property
    def keys(self) -> set[bytes]:
        tree = self.memory.tree
        return {
            [*page_keys(tree._tokens_to(node)[: -(len(node.pages) - page - 1) * SIZE or None], SIZE, node.kv_key)][-1]
            for node in tree.nodes()
            for page in range(len(node.pages))
        }


def test_ten_thousand_batches_with_gaps_late_answers_and_restarts() -> None:
    """While it is used the mirror is a part of the cache; all of it, unless what is missing can no longer be had.

    A restart is seen as a loss of contact, after which the numbers of the new life may be those of the old one.
    """
    rng = random.Random(1)
    engine, followed = Engine(rng), FollowedCache(SIZE)
    times: list[float] = []
    whole, seen = True, {"gap": 0, "lost": 0, "restart": 0, "same number": 0, "passed by": 0, "quiet": 0}

    def step(now: float) -> Batch:
        number, events = engine.step()
        times.append(now)
        return Batch(number, now, events)

    for now in range(BATCHES):
        outage, short_lives = now % 700 < 70, now % 900 > 860
        if rng.random() < (0.2 if short_lives else 0.002):
            engine.restart()
            times.clear()
            followed.doubt()
            seen["restart"] += 1
            for _ in range(rng.randrange(12)):
                step(now + rng.random() / 9)
        batch = step(now + 0.5)
        if rng.random() < 0.04:
            continue  # it does not arrive
        was_right = followed.is_right
        seen["gap"] += was_right and not followed.live(batch)
        while not followed.is_right and not outage and rng.random() < 0.5:
            first = followed.wanted
            kept = range(max(first, len(times) - KEPT), len(times))
            answer = [Batch(number, times[number], engine.sent[number]) for number in kept]
            if rng.random() < 0.1:
                followed.live(step(now + 0.8))
                seen["passed by"] += 1
            life = followed.mirror.next > first > 0 and first < len(times)
            seen["same number"] += life and times[first] != followed.mirror.newest
            if followed.answered(first, answer):
                whole = (whole or first == 0) and kept.start == first
                seen["lost"] += kept.start > first
        if followed.is_right and followed.mirror.next == len(times):
            whole = whole or isinstance(engine.sent[-1][-1], CacheCleared)
            if now % 4:
                continue
            assert followed.mirror.pool <= engine.keys, f"batch {now}: a page is told that is not there"
            assert not whole or followed.mirror.pool == engine.keys, f"batch {now}: a page is there and not told"
            seen["quiet"] += 1
    assert min(seen.values()) > 5, seen


def test_a_batch_that_comes_again_changes_nothing() -> None:
    mirror, ids = CacheMirror(SIZE), list(range(8))
    stored = PagesStored(parent=None, keys=tuple(page_keys(ids, SIZE, (0, 0))), tokens=tuple(ids))
    mirror.take(0, 1.0, [stored])
    mirror.take(1, 2.0, [CacheCleared()])
    assert not mirror.take(0, 1.0, [stored])
    assert not mirror.pool
    # A lower number that was sent later is of an engine that was started again.
    assert not mirror.take(0, 3.0, [stored])
    assert mirror.next == 1


def test_a_prompt_is_found_in_the_pool_and_after_it_on_the_host() -> None:
    mirror, ids = CacheMirror(SIZE), list(range(14))
    keys = tuple(page_keys(ids, SIZE, (0, 0)))
    stored = PagesStored(parent=None, keys=keys[:1], tokens=tuple(ids[:4]))
    assert not mirror.take(0, 1.0, [stored, PagesStored(parent=None, keys=keys[1:], on_host=True)])
    assert [mirror.cached_pages(ids), mirror.cached_pages(ids, (1, 0)), mirror.cached_pages(ids[:7])] == [3, 0, 1]
    mirror.take(1, 2.0, [PagesRemoved(keys=keys[1:2], on_host=True)])
    assert mirror.cached_pages(ids) == 1
    assert mirror.take(5, 3.0, []) == range(2, 5)
