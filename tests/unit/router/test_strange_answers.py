"""C01: for any answer of an engine, only that engine is excluded, with a reason, and nothing else ends."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
import zmq
import zmq.asyncio
from partners import IDLE_LOAD, damaged
from played_engines import NAMES, PlayedEngine, Scene, play

from engine.cluster.router.front import MAX_EVENT_BYTES
from engine.cluster.router.watch import Subscription
from engine.core.frames import BadFrameError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.memory.node import page_keys
from engine.core.messages import PagesStored
from engine.core.routing.cache_index import MAX_KNOWN_PAGES, Batch, CacheMirror, FollowedCache
from engine.core.routing.placement import Placement, Prompt, Rules
from engine.frontend.http.kv_events import EventBatch, batch_in, to_wire
from engine.frontend.http.peers import (
    MAX_PEER_ANSWER_BYTES,
    MAX_SHOWN_CHARS,
    PartnerError,
    Peer,
    PeerAnswer,
    about_in,
    load_in,
    state_in,
)
from engine.frontend.schema.errors import ApiError
from engine.process.settings import ServerSettings

COUNT = 10_000
json_bytes = msgspec.json.encode
SIZE = 16
IDS = tuple(range(1, 2 * SIZE + 1))
LOAD = [msgspec.to_builtins(IDLE_LOAD)]
ABOUT = {
    "settings": ServerSettings().model_dump(mode="json"),
    "limits": msgspec.to_builtins(Limits.of(ServerSettings(), EMBEDDED_FACTS, 4096)),
    "processes": {"engine": 7},
}
STATE = {"stats": {"paused": None, "alive": 1, "sleep_level": 0}, "weights": "embedded", "open_calls": 0}
EVENT = PagesStored(parent=None, keys=tuple(page_keys(IDS, SIZE, (3, 5))), tokens=IDS, kv_key=(3, 5), lora_name="x")
READERS: dict[str, tuple[Callable[[PeerAnswer], Any], Any]] = {
    "load": (load_in, LOAD),
    "about": (about_in, ABOUT),
    "state": (state_in, STATE),
    "words": (lambda answer: answer.words, {"error": {"message": "no"}}),
}


@pytest.mark.parametrize("name", READERS)
def test_ten_thousand_damaged_answers_are_a_value_within_bounds_or_a_fault(name: str) -> None:
    read, right = READERS[name]
    placement = Placement(Rules(), index_chunks=8)
    placement.join("a", 8)
    read_right, longest = 0, 0
    for number, body in enumerate(damaged(right, json_bytes, COUNT)):
        try:
            value = read(PeerAnswer((200, 500)[number % 7 == 0], body))
        except PartnerError as exc:
            longest = max(longest, len(str(exc)))
            continue
        read_right += 1
        if name == "load":
            placement.take_load("a", value)
            ticket = placement.place(Prompt.of_ids(IDS, SIZE))
            placement.ended(ticket)  # type: ignore[arg-type] # one that is idle refuses none
        elif name == "words":
            assert value.isprintable()
            longest = max(longest, len(value))
    assert longest < 2 * MAX_SHOWN_CHARS
    assert read_right > COUNT // 100, "the damage leaves next to nothing to read"


def test_a_thousand_damaged_refusals_of_a_client_are_its_error_or_a_fault() -> None:
    """The router asks in the client's name, and passes the refusal on."""
    answers: Iterator[httpx.Response] = iter(())
    peer = Peer("http://x", ServerSettings(), 5, httpx.MockTransport(lambda _: next(answers)))
    refusal = {"error": {"message": "no", "type": "authentication_error", "code": 401}}

    async def fault_of(status: int, body: bytes) -> Exception:
        nonlocal answers
        answers = iter([httpx.Response(status, content=body)])
        with pytest.raises((ApiError, PartnerError)) as raised:
            await peer.load_for({})
        return raised.value

    async def ask() -> None:
        passed_on = 0
        for number, body in enumerate(damaged(refusal, json_bytes, 1000)):
            status = (401, 403, 429, 500, 503)[number % 5]
            fault = await fault_of(status, body)
            if isinstance(fault, ApiError):
                passed_on += 1
                assert (fault.status, bool(json_bytes(fault.body))) == (status, True)
            else:
                assert len(str(fault)) < 2 * MAX_SHOWN_CHARS
        assert 10 < passed_on < 990, "the damage leaves one kind of answer alone"
        await peer.close()

    asyncio.run(ask())


def test_ten_thousand_damaged_batches_of_events_leave_a_mirror_that_can_be_used() -> None:
    right = msgspec.msgpack.decode(msgspec.msgpack.encode(EventBatch(1.0, [to_wire(EVENT), to_wire(EVENT)])))
    cache = FollowedCache(SIZE)
    taken = 0
    for number, payload in enumerate(damaged(right, msgspec.msgpack.encode, COUNT)):
        written = [cache.mirror.next.to_bytes(8, "big"), number.to_bytes(8, "big"), payload[:8], b""][number % 4]
        try:
            batch = batch_in((b"", written, payload)[number % 3 :])
        except BadFrameError:
            continue
        taken += 1
        cache.live(batch)
        cache.answered(cache.wanted, [batch])
        cache.cached_pages(IDS, "x", 5)
        assert cache.wanted < 2**63
    assert taken > COUNT // 100, "the damage leaves next to nothing to read"


STRANGE = {
    "brackets": b"[" * 200_000,
    "objects": b'{"a":' * 40_000,
    "no pages": json_bytes([LOAD[0] | {"free_pages": None}]),
    "too many pages": b'[{"free_pages": 1%s}]' % (b"0" * 5000),
    "no list": b"{}",
    "two of them": json_bytes(LOAD * 2),
    "no page size": json_bytes(ABOUT | {"limits": ABOUT["limits"] | {"page_size": 0}}),
    "large": b" " * (MAX_PEER_ANSWER_BYTES + 1),
}


@pytest.mark.parametrize("status", [200, 500])
@pytest.mark.parametrize("path", ["/get_load", "/server_info"])
@pytest.mark.parametrize("name", STRANGE)
def test_an_engine_that_answers_strangely_is_left_out_and_the_others_serve(name: str, path: str, status: int) -> None:
    async def scene(stage: Scene) -> None:
        watching = [asyncio.create_task(watch.run()) for watch in stage.router.watches]
        stage.one.said[path] = httpx.Response(status, content=STRANGE[name])
        # It is described again when it was away.
        stage.one.is_up = False
        await stage.look()
        stage.one.is_up = True
        for _ in range(2):
            await stage.look()
        why = stage.router.engines.engines[NAMES[0]].why_not
        assert why.startswith("cannot be used: it ")
        assert len(why) < 1000
        for _ in range(3):
            asked = stage.ask()
            assert (await asked.end(), asked.headers["x-engine"]) == (b"{}", NAMES[1])
        assert not any(task.done() for task in watching), "one engine's answer has ended a watch"
        stage.one.said.clear()
        await stage.look()
        assert not stage.router.engines.engines[NAMES[0]].why_not
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)

    play(scene)


def test_whatever_goes_wrong_in_a_look_is_that_engines_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """C01: also what nobody has thought of."""

    async def scene(stage: Scene) -> None:
        watch, _ = stage.router.watches
        monkeypatch.setattr(watch._engine.proxy, "load", lambda: 1 / 0)
        await watch.look()
        assert "could not be looked at (ZeroDivisionError)" in stage.router.engines.engines[NAMES[0]].why_not
        asked = stage.ask()
        assert (await asked.end(), asked.headers["x-engine"]) == (b"{}", NAMES[1])
        monkeypatch.undo()
        await watch.look()
        assert not stage.router.engines.engines[NAMES[0]].why_not

    play(scene)


def test_an_operators_call_ends_whatever_the_engines_answer() -> None:
    async def scene(stage: Scene) -> None:
        for number, body in enumerate(damaged(STATE, json_bytes, 60)):
            stage.one.instead["/server_info"] = httpx.Response((200, 500)[number % 2], content=body)
            asked = stage.ask("/pause_generation", {"mode": "in_place"})
            await asked.end()
            assert asked.status in (200, 400, 503)
            stage.one.instead.clear()
            await stage.look()
        asked = stage.ask("/continue_generation")
        await asked.end()
        assert asked.status == 200

    play(scene)


def test_an_answer_that_no_server_can_pass_on_is_a_lost_engine() -> None:
    async def scene(stage: Scene) -> None:
        stage.one.status = 999
        asked = stage.ask()
        assert (await asked.end(), asked.headers["x-engine"]) == (b"{}", NAMES[1])

    play(scene)


def test_a_header_passes_byte_for_byte() -> None:
    """C01: characters beyond Latin-1 cannot be written again, and would fail the request."""

    class Odd(PlayedEngine):
        async def answer(self, request: httpx.Request) -> httpx.Response:
            answer = await super().answer(request)
            answer.headers = httpx.Headers([*answer.headers.raw, (b"x-odd", "\u20ac".encode())])
            return answer

    async def scene(stage: Scene) -> None:
        asked = stage.ask()
        assert await asked.end() == b"{}"
        assert asked.status == 200

    play(scene, Odd(), Odd())


def test_an_event_without_end_ends_its_stream_and_takes_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_EVENT_BYTES > 2**20
    monkeypatch.setattr("engine.cluster.router.front.MAX_EVENT_BYTES", 100)
    monkeypatch.setattr("engine.cluster.router.front.MAX_ANSWER_BYTES", 100)

    async def scene(stage: Scene) -> None:
        stage.one.headers = {"content-type": "text/event-stream"}
        stage.one.parts = [b"data: 1\n\n", *[b"x" * 30] * 4, asyncio.Event()]
        said = await stage.ask().end()
        assert b"without an end" in said
        stage.one.headers, stage.one.parts = {"content-type": "text/plain"}, [*[b"x" * 30] * 4, asyncio.Event()]
        await stage.look()
        asked = stage.ask()
        assert (await asked.end(), asked.headers["x-engine"]) == (b"{}", NAMES[1])

    play(scene)


def test_a_mirror_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_KNOWN_PAGES > 10**6
    monkeypatch.setattr("engine.core.routing.cache_index.MAX_KNOWN_PAGES", 100)
    monkeypatch.setattr("engine.core.routing.cache_index.MAX_KNOWN_LORAS", 10)
    cache = FollowedCache(SIZE)
    cache.answered(0, [])
    for number in range(200):
        stored = PagesStored(parent=None, keys=(number.to_bytes(16, "big"),), kv_key=(1, 0), lora_name=str(number))
        cache.live(Batch(number, float(number), [stored]))
        assert len(cache.mirror.pool) <= 100
        assert len(cache.versions) <= 10
    assert isinstance(cache.mirror, CacheMirror)


ODD_MESSAGES: tuple[tuple[bytes, ...], ...] = (
    (b"",),
    (b"", b"12345678"),
    (b"", b"x" * 1000, b"\x90"),
    (b"", b"\xff" * 7 + b"\xfe", msgspec.msgpack.encode([1.0, []])),
    (b"", bytes(8), b"\x91" * 200_000),
)


@pytest.mark.parametrize("parts", ODD_MESSAGES)
def test_an_answer_with_events_of_any_shape_leaves_a_doubt(
    tmp_path: Any, caplog: pytest.LogCaptureFixture, parts: tuple[bytes, ...]
) -> None:
    """C01: the question is asked by the watch of an engine."""
    endpoint = f"ipc://{tmp_path}/again"

    async def scene() -> None:
        with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as answering:
            answering.setsockopt(zmq.LINGER, 0)
            answering.bind(endpoint)
            subscription = Subscription("ipc://", endpoint, FollowedCache(SIZE))
            listening = asyncio.create_task(subscription.run())
            asking = asyncio.create_task(subscription.ask())
            who, *_ = await answering.recv_multipart()
            await answering.send_multipart((who, *parts))
            await asking
            assert not subscription.cache.is_right
            assert not listening.done(), "an endpoint that cannot be followed ends the questions too"
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    with caplog.at_level(logging.WARNING):
        asyncio.run(asyncio.wait_for(scene(), 30))
    assert "did not answer with KV events" in caplog.text
