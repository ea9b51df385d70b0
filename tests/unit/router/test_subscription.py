"""KV events over ZMQ, from the publisher of an engine to the mirror of a router: gaps and restarts included."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from engine.cluster.router.watch import Subscription
from engine.core.memory.node import page_keys
from engine.core.messages import CacheCleared, PagesRemoved, PagesStored
from engine.core.routing.cache_index import FollowedCache
from engine.frontend.http.kv_events import KvEvents

SIZE = 4
IDS = tuple(range(1, 13))
KEYS = tuple(page_keys(IDS, SIZE, (0, 0)))
STORED = PagesStored(parent=None, keys=KEYS, tokens=IDS)


async def until(true: Callable[[], bool]) -> None:
    while not true():
        await asyncio.sleep(0.005)


def test_a_mirror_follows_an_engine_over_its_lives(tmp_path: Path) -> None:
    live, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"

    async def scene() -> None:
        loop = asyncio.get_running_loop()
        events = KvEvents(live, again)
        events.listen(loop)
        events.publish([STORED])
        salted = PagesStored(
            parent=None, keys=(b"k" * 16,), tokens=IDS[:4], kv_key=(3, 0xFFFF_0000_0000_0001), lora_name="x"
        )
        events.publish([salted, PagesStored(parent=None, keys=KEYS[:1], on_host=True)])
        subscription = Subscription(live, again, FollowedCache(SIZE))
        cache = subscription.cache
        listening = asyncio.create_task(subscription.run())
        try:
            assert not cache.cached_pages(IDS)
            await subscription.ask()
            assert cache.cached_pages(IDS) == 3
            assert (cache.versions, cache.mirror.host) == ({"x": 3}, {KEYS[0]})
            # A subscriber is one when the publisher has heard of it; what was not heard is asked for.
            await until(lambda: bool(events.publish([PagesRemoved(keys=KEYS[2:])]) or cache.mirror.next > 2))
            await until(lambda: cache.cached_pages(IDS) == 2)
            loop.remove_reader(events._replay.getsockopt(zmq.FD))
            events.close()
            await until(lambda: not cache.is_right)
            assert not cache.cached_pages(IDS), "a mirror of an earlier life is used"
            events = KvEvents(live, again)
            events.listen(loop)
            for _ in range(5):
                events.publish([CacheCleared()])
            await subscription.ask()
            assert cache.is_right
            assert not cache.cached_pages(IDS), "a mirror of an earlier life is used"
            events.publish([STORED])
            await subscription.ask()
            assert cache.cached_pages(IDS) == 3
        finally:
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)
            loop.remove_reader(events._replay.getsockopt(zmq.FD))
            events.close()

    async def bounded() -> None:
        async with asyncio.timeout(30):
            await scene()

    asyncio.run(bounded())


def test_what_is_no_batch_leaves_the_mirror_in_doubt(caplog: pytest.LogCaptureFixture) -> None:
    async def scene() -> None:
        subscription = Subscription("ipc:///none", "ipc:///none", FollowedCache(SIZE))
        subscription.cache.answered(0, [])
        assert subscription._misses((b"", bytes(8), b"\xc1"))
        assert not subscription.cache.is_right
        subscription._context.term()

    asyncio.run(scene())
    assert "ipc:///none published no KV events" in caplog.text
