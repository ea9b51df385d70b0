"""KV events on the wire: batches in order, asked for again, in the shape of vLLM's, from a server too."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from real_servers import running

from engine.core.errors import ConfigError, EngineError
from engine.core.memory.node import page_keys
from engine.core.messages import CacheCleared, PagesRemoved, PagesStored
from engine.frontend.http import kv_events
from engine.frontend.http.kv_events import KvEvents
from engine.process.logs import OncePerMinute
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent

PATIENCE_MS = 20_000
STORED = PagesStored(parent=None, keys=(b"k" * 16,), tokens=(1, 2, 3, 4), kv_key=(2, 5), lora_name="x")
END = (-1).to_bytes(8, "big", signed=True)


@contextlib.contextmanager
def connected(kind: int, endpoint: str) -> Iterator[zmq.Socket[bytes]]:
    with zmq.Context() as context, context.socket(kind) as opened:
        opened.setsockopt(zmq.LINGER, 0)
        opened.setsockopt(zmq.RCVTIMEO, PATIENCE_MS)
        if kind == zmq.SUB:
            opened.setsockopt(zmq.SUBSCRIBE, b"")
        opened.connect(endpoint)
        yield opened


def replayed(asking: zmq.Socket[bytes], first: int) -> dict[int, Any]:
    """Return the kept batches from a number on, decoded without the classes that encoded them."""
    asking.send_multipart((b"", first.to_bytes(8, "big")))
    batches = {}
    while True:
        *_, number, payload = asking.recv_multipart()
        if number == END:
            return batches
        batches[int.from_bytes(number, "big")] = msgspec.msgpack.decode(payload)


def test_batches_are_numbered_and_can_be_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "MAX_KEPT_BATCHES", 3)
    live, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"

    async def served() -> None:
        events = KvEvents(live, again)
        try:
            events.listen(asyncio.get_running_loop())
            with connected(zmq.SUB, live) as listening, connected(zmq.DEALER, again) as asking:
                # A subscriber is one when the publisher has heard of it.
                while not listening.poll(20):
                    events.publish([CacheCleared()])
                topic, number, _payload = listening.recv_multipart()
                assert (topic, len(number)) == (b"", 8)
                told = [
                    STORED,
                    PagesRemoved(keys=STORED.keys),
                    PagesStored(parent=None, keys=STORED.keys, on_host=True),
                ]
                for event in told:
                    events.publish([event])
                batches = await asyncio.to_thread(replayed, asking, 0)
                asking.send_multipart((b"", b"short"))
                last = await asyncio.to_thread(replayed, asking, max(batches))
        finally:
            events.close()
        assert [batch[1] for batch in batches.values()] == [
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [STORED.keys[0]],
                    "parent_block_hash": None,
                    "token_ids": [1, 2, 3, 4],
                    "block_size": 4,
                    "lora_id": 2,
                    "medium": "GPU",
                    "lora_name": "x",
                    "extra_keys": [["0000000000000005"]],
                }
            ],
            [{"type": "BlockRemoved", "block_hashes": [STORED.keys[0]], "medium": "GPU"}],
            [
                {
                    "type": "BlockStored",
                    "block_hashes": [STORED.keys[0]],
                    "parent_block_hash": None,
                    "token_ids": [],
                    "block_size": 0,
                    "lora_id": None,
                    "medium": "CPU",
                    "lora_name": None,
                }
            ],
        ]
        assert list(batches) == [max(batches) - 2, max(batches) - 1, max(batches)]
        assert list(last) == [max(batches)]

    asyncio.run(served())


def test_a_long_answer_is_sent_over_several_turns_of_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """46.3: a question took one turn for all kept batches, and so did each question of a peer that asks on and on."""
    portion, count, again = 10, 95, f"ipc://{tmp_path}/again"
    monkeypatch.setattr(kv_events, "_BATCHES_A_TURN", portion)

    async def served() -> None:
        events, loop = KvEvents("", again), asyncio.get_running_loop()
        in_turn: list[int] = []
        answered = events._answered

        def counted(replay: Any, who: bytes, wanted: int) -> Any:
            left = answered(replay, who, wanted)
            in_turn.append(count - wanted if left is None else left[1] - wanted)
            return left

        monkeypatch.setattr(events, "_answered", counted)
        try:
            for _ in range(count):
                events.publish([CacheCleared()])
            events.listen(loop)
            with connected(zmq.DEALER, again) as asking:
                for first in (0, 90, 95, 2**64 - 1):
                    batches = await asyncio.to_thread(replayed, asking, first)
                    assert list(batches) == list(range(min(first, count), count))
        finally:
            events.close()
        assert in_turn[:10] == [portion] * 9 + [5]
        assert max(in_turn) == portion

    asyncio.run(served())


def test_bad_questions_of_a_stranger_are_one_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """46.3: each was a line of the log."""

    async def served() -> None:
        events = KvEvents("", f"ipc://{tmp_path}/again")
        try:
            events.listen(asyncio.get_running_loop())
            with connected(zmq.DEALER, f"ipc://{tmp_path}/again") as asking:
                for number in range(500):
                    asking.send_multipart((b"", b"?" * (number % 7)))
                await asyncio.to_thread(replayed, asking, 0)
        finally:
            events.close()

    with caplog.filtering(OncePerMinute()):
        asyncio.run(served())
    assert [record.message for record in caplog.records] == [
        "dropped a request for KV events of 0 bytes, which must be a number of 8 bytes"
    ]


def test_an_address_that_cannot_be_bound_is_named(tmp_path: Path) -> None:
    with pytest.raises(
        EngineError, match=r"kv_events_endpoint 'ipc:///.*/none/live' cannot be bound: .*; choose another"
    ):
        KvEvents(f"ipc://{tmp_path}/none/live")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (
            {"kv_events": True, "kv_events_endpoint": "tcp://*:5557"},
            "no key protects them; take them to another machine",
        ),
        ({"kv_events": True, "kv_events_endpoint": "5557"}, "must be tcp://127.0.0.1:PORT or ipc://PATH, got '5557'"),
        ({"kv_events_endpoint": "tcp://127.0.0.1:5557"}, "needs kv_events, which it publishes"),
        ({"kv_events": True, "kv_events_replay_endpoint": "ipc:///x"}, "needs kv_events_endpoint"),
        ({"kv_events": True, "radix_cache": False}, "kv_events needs radix_cache"),
    ],
)
def test_settings_that_publish_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ServerSettings(**settings)


def test_a_server_tells_what_a_prompt_will_find(parent: PreloadedParent, tmp_path: Path) -> None:
    live, again = f"ipc://{tmp_path}/live", f"ipc://{tmp_path}/again"
    prompt = list(range(1, 82))
    body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 3, "temperature": 0}}
    settings = {"kv_events": True, "kv_events_endpoint": live, "kv_events_replay_endpoint": again}
    with running(parent, tmp_path, **settings) as server, connected(zmq.DEALER, again) as asking:
        first = server.http.post("/generate", json=body).json()
        batches = replayed(asking, 0)
        stored = [key for batch in batches.values() for event in batch[1] for key in event.get("block_hashes", ())]
        told = [*page_keys(prompt, 16, (0, 0))]
        assert all(key in stored for key in told)
        second = server.http.post("/generate", json=body).json()
        assert second["meta_info"]["cached_tokens"] == 16 * len(told)
        assert second["output_ids"] == first["output_ids"]
        assert server.http.post("/flush_cache").status_code == 200
        assert replayed(asking, max(batches) + 1)[max(batches) + 1][1] == [{"type": "AllBlocksCleared"}]
