"""A picture of a cache made of its KV events: right after gaps and restarts, and never too large."""

from __future__ import annotations

import random

from engine.memory import KVMemory
from engine.memory.cache_log import CacheLog
from engine.memory.node import page_keys
from engine.messages import CacheCleared, CacheEvent, PagesRemoved, PagesStored
from engine.routing import CachePicture

SIZE, PAGES, BATCHES, KEPT = 4, 24, 10_000, 50


class Engine:
    """A memory that requests come to and leave, and what it told; the last ``KEPT`` batches can be asked for again."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.restart()

    def restart(self) -> None:
        log = CacheLog(SIZE)
        self.memory = KVMemory(total_pages=PAGES, page_size=SIZE, rows=4, radix_cache=True, log=log)
        self.sent: list[tuple[CacheEvent, ...]] = []

    def step(self) -> tuple[int, tuple[CacheEvent, ...]]:
        """One request, an eviction or a flush, until something was told."""
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


def test_ten_thousand_batches_with_gaps_repetitions_and_restarts() -> None:
    """After each batch the picture is a part of the cache; all of it, unless what is missing can no longer be had."""
    rng = random.Random(1)
    engine, picture = Engine(rng), CachePicture(SIZE)
    now, whole, seen = 0.0, True, {"gap": 0, "lost": 0, "restart": 0, "again": 0}
    for _ in range(BATCHES):
        now += 1
        if rng.random() < 0.002:
            engine.restart()
            seen["restart"] += 1
        number, events = engine.step()
        if rng.random() < 0.05:
            continue  # it does not arrive
        missing = picture.take(number, now, events)
        whole = whole or number == 0
        if missing:
            seen["gap"] += 1
            if missing.start < number - KEPT or rng.random() < 0.1:
                seen["lost"] += 1
                picture.start_over(number)
                whole = False
            for one in range(picture.next, number + 1):
                picture.take(one, now, engine.sent[one])
        if rng.random() < 0.05:
            before = set(picture.pool)
            assert not picture.take(number, now, events)
            assert picture.pool == before
            seen["again"] += 1
        whole = whole or isinstance(events[-1], CacheCleared)
        assert picture.pool <= engine.keys
        assert not whole or picture.pool == engine.keys
    assert min(seen.values()) > 5, seen


def test_a_prompt_is_found_in_the_pool_and_after_it_on_the_host() -> None:
    picture, ids = CachePicture(SIZE), list(range(14))
    keys = tuple(page_keys(ids, SIZE, (0, 0)))
    stored = PagesStored(parent=None, keys=keys[:1], tokens=tuple(ids[:4]))
    assert not picture.take(0, 1.0, [stored, PagesStored(parent=None, keys=keys[1:], on_host=True)])
    assert [picture.cached_pages(ids), picture.cached_pages(ids, (1, 0)), picture.cached_pages(ids[:7])] == [3, 0, 1]
    picture.take(1, 2.0, [PagesRemoved(keys=keys[1:2], on_host=True)])
    assert picture.cached_pages(ids) == 1
    assert picture.take(5, 3.0, []) == range(2, 5)
