"""Peers of KV ports that are gone, slow or wrong: each costs its own transfers or connection, and no stage."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_peers import (
    WAIT_S,
    Decode,
    Decoder,
    Open,
    Prefill,
    Prefiller,
    SmallStage,
    images,
    no_thread_is_left,
    receive,
    send,
)
from partners import damaged

from engine.core.frames import BadFrameError, framed
from engine.core.messages import PagesReceived, PagesSent, encode
from engine.core.plan import StopTransfer
from engine.model.page_image import PageImages
from engine.pipeline import kv_receiver, kv_sender
from engine.pipeline.kv_frames import END, HEADER, KV_PROTOCOL, PAGE, Greeting, Verdict, decode_greeting, decode_verdict
from engine.process.kv_addresses import KVAddress


def test_a_send_without_progress_fails_and_what_waits_behind_it_too(
    opened: Open, private_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "PROGRESS_TIMEOUT_S", 0.1)
    stuck = opened(Decoder(private_dir))
    source = SmallStage(page_tokens=1024, layers=16)
    sender = opened(source.sender())
    sender.order(send(1, stuck.address, *range(8)))
    sender.order(send(2, stuck.address, 0))
    words = f"stage 0: KV could not be sent to {stuck.address}: it has accepted or confirmed nothing for 0.1 s"
    assert [source.answer(), source.answer()] == [PagesSent(transfer=number, error=words) for number in (1, 2)]


def test_a_peer_that_takes_all_and_confirms_nothing_fails(
    opened: Open, private_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "PROGRESS_TIMEOUT_S", 0.1)
    silent = opened(Decoder(private_dir))
    source = SmallStage()
    sender = opened(source.sender())
    sender.order(send(1, silent.address, 0))
    assert "accepted or confirmed nothing" in str(source.answer())


def test_a_decode_engine_that_dies_costs_its_orders_alone(
    decode: Decode, opened: Open, private_dir: Path, prefill: Prefill
) -> None:
    (target, receiver), (source, sender) = decode, prefill
    dying = opened(Decoder(private_dir, lambda connection: connection.recv(1)))
    sender.order(send(1, dying.address, *range(8)))
    answer = source.answer()
    assert isinstance(answer, PagesSent)
    assert f"KV could not be sent to {dying.address}" in str(answer.error)
    sender.order(send(2, KVAddress(private_dir / "nowhere", "x"), 0))
    assert "No such file" in str(source.answer())
    receiver.order(receive(1, 0))
    sender.order(send(3, receiver.address, 0))
    assert (source.answer(), target.answer()) == (PagesSent(transfer=3), PagesReceived(transfer=1, pages=1))


def test_a_prefill_engine_that_dies_in_a_page_leaves_what_is_whole(
    decode: Decode, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    target, receiver = decode
    layout, page = target.images().layout, bytes([9]) * target.images().image_bytes
    receiver.order(receive(1, 0, 1, 2))
    dying, other = (opened(Prefiller(receiver.address, layout)) for _ in range(2))
    dying.bring(1, 0, page)
    assert dying.end(1) is None
    before = images(target, 1)
    dying.bring(1, 1, page[:-1])
    with caplog.at_level(logging.WARNING):
        dying.connection.shutdown(socket.SHUT_WR)
        assert dying.is_closed()
    assert "in the middle of a frame" in caplog.text
    assert images(target, 1) == before
    # Another connection goes on where it ended.
    other.bring(1, 1, page)
    assert other.end(1) is None
    receiver.order(StopTransfer(1))
    assert target.answer() == PagesReceived(transfer=1, pages=2)


def test_pages_of_an_unknown_transfer_are_dropped_and_told_once(
    decode: Decode, opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    target, receiver = decode
    peer = opened(Prefiller(receiver.address, target.images().layout))
    page = bytes([9]) * target.images().image_bytes
    receiver.order(receive(78, 0))
    receiver.order(StopTransfer(78))
    assert target.answer() == PagesReceived(transfer=78, pages=0)
    before = images(target, *range(8))
    with caplog.at_level(logging.INFO):
        for place in range(3):
            peer.bring(77, place, page)
        assert "has no open transfer 77" in str(peer.end(77))
    assert caplog.text.count("dropped pages") == 1
    assert images(target, *range(8)) == before
    receiver.order(receive(79, 0))
    peer.bring(79, 0, page)
    assert peer.end(79) is None
    assert target.answer() == PagesReceived(transfer=79, pages=1)


@pytest.mark.parametrize("forgotten", [0, 2])
def test_a_page_that_is_there_before_its_order_waits_for_it(decode: Decode, opened: Open, forgotten: int) -> None:
    """A stage gets the order after everything that it still has to compute; numbers restart for each script."""
    target, receiver = decode
    for number in range(1, forgotten + 1):
        receiver.order(receive(number, 5))
    receiver.forget()
    peer = opened(Prefiller(receiver.address, target.images().layout))
    peer.bring(1, 0, bytes([9]) * target.images().image_bytes)
    deadline = time.monotonic() + WAIT_S
    while not receiver._lock._waiters:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    receiver.order(receive(1, 5))
    assert target.answer() == PagesReceived(transfer=1, pages=1)
    assert images(target, 5) == [bytes([9]) * target.images().image_bytes]


def test_a_page_does_not_wait_for_ever_for_its_order(
    decode: Decode, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none that waits keeps the port from its end."""
    monkeypatch.setattr(kv_receiver, "EARLY_WAIT_S", 0.02)
    target, receiver = decode
    peer = opened(Prefiller(receiver.address, target.images().layout))
    peer.bring(1, 0, bytes(target.images().image_bytes))
    assert "has no open transfer 1" in str(peer.end(1))
    monkeypatch.setattr(kv_receiver, "EARLY_WAIT_S", WAIT_S)
    peer.bring(1, 0, bytes(target.images().image_bytes))


@pytest.mark.parametrize(
    ("places", "words"),
    [((0, 0), "page 0 of transfer 1 came twice"), ((3,), "page 3 of transfer 1 is beyond the 3 pages")],
)
def test_a_page_that_none_asks_for_ends_its_connection(
    decode: Decode, opened: Open, caplog: pytest.LogCaptureFixture, places: tuple[int, ...], words: str
) -> None:
    target, receiver = decode
    peer = opened(Prefiller(receiver.address, target.images().layout))
    receiver.order(receive(1, 0, 1, 2))
    with caplog.at_level(logging.WARNING):
        for place in places:
            peer.bring(1, place, bytes(target.images().image_bytes))
        assert peer.is_closed()
    assert words in caplog.text


@pytest.mark.parametrize("data", [b"\0\0\0\0", b"GET / HTTP/1.1\r\n\r\n", b"\5\0\0\0hello", b"\xff" * 40])
def test_garbage_ends_its_connection_alone(
    decode: Decode, opened: Open, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """Before the greeting, and after it."""
    target, receiver = decode
    stranger = opened(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    stranger.connect(str(receiver.address.place))
    peer = opened(Prefiller(receiver.address, target.images().layout))
    with caplog.at_level(logging.WARNING):
        for connection in (stranger, peer.connection):
            connection.settimeout(WAIT_S)
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert caplog.text.count("closed the KV connection of") == 2
    receiver.order(receive(1, 0))
    other = opened(Prefiller(receiver.address, target.images().layout))
    other.bring(1, 0, bytes(target.images().image_bytes))
    assert target.answer() == PagesReceived(transfer=1, pages=1)


def test_one_who_does_not_greet_is_let_go(decode: Decode, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_receiver, "GREETING_TIMEOUT_S", 0.05)
    _, receiver = decode
    stranger = opened(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    stranger.settimeout(WAIT_S)
    stranger.connect(str(receiver.address.place))
    assert stranger.recv(1) == b""


def test_a_thread_that_is_ending_is_waited_for(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its connection is over and forgotten before it has ended itself."""
    close, is_ending = socket.socket.close, threading.Event()

    def slow(connection: socket.socket) -> None:
        if threading.current_thread().name == "kv-receiver":
            is_ending.set()
            time.sleep(0.2)
        close(connection)

    monkeypatch.setattr(socket.socket, "close", slow)
    _, receiver = decode
    with no_thread_is_left():
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stranger:
            stranger.connect(str(receiver.address.place))
        assert is_ending.wait(WAIT_S)
        receiver.close()


def test_one_too_many_is_let_go(decode: Decode, opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    target, receiver = decode
    monkeypatch.setattr(kv_receiver, "MAX_CONNECTIONS", 1)
    opened(Prefiller(receiver.address, target.images().layout))
    stranger = opened(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
    stranger.settimeout(WAIT_S)
    stranger.connect(str(receiver.address.place))
    assert stranger.recv(1) == b""


def test_a_device_that_fails_ends_one_connection(
    decode: Decode, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target, receiver), (source, sender) = decode, prefill

    def broken(*_: object) -> None:
        raise RuntimeError("no device")

    receiver.order(receive(1, 0))
    with monkeypatch.context() as patch:
        patch.setattr(PageImages, "write", broken)
        sender.order(send(1, receiver.address, 0))
        assert "KV could not be sent" in str(source.answer())
        patch.setattr(PageImages, "read", broken)
        sender.order(send(2, receiver.address, 0))
        assert "RuntimeError: no device" in str(source.answer())
    sender.order(send(3, receiver.address, 0))
    assert (source.answer(), target.answer()) == (PagesSent(transfer=3), PagesReceived(transfer=1, pages=1))


def test_pages_that_do_not_exist_are_answered(decode: Decode, prefill: Prefill) -> None:
    (target, receiver), (source, sender) = decode, prefill
    receiver.order(receive(1, 0, 8))
    assert target.answer() == PagesReceived(transfer=1, pages=0)
    sender.order(send(1, receiver.address, -1))
    assert "pages of a transfer must be in 0..7, got (-1,)" in str(source.answer())
    sender.order(send(2, "nowhere", 0))
    assert "an address of KV must be unix:PATH#RUN or tcp:HOST:PORT#RUN, got 'nowhere'" in str(source.answer())


def test_a_thread_that_has_nothing_to_send_ends_and_comes_back(
    decode: Decode, prefill: Prefill, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "IDLE_S", 0.01)
    (target, receiver), (source, sender) = decode, prefill
    for number in (1, 2):
        receiver.order(receive(number, 0))
        sender.order(send(number, receiver.address, 0, to_transfer=number))
        lane = next(iter(sender._lanes.values()), None)
        assert (source.answer(), target.answer()) == (
            PagesSent(transfer=number),
            PagesReceived(transfer=number, pages=1),
        )
        if lane is not None:
            lane._thread.join(WAIT_S)
            assert not lane._thread.is_alive()
        assert sender._lanes == {}


def test_ten_thousand_damaged_frames_are_a_value_or_a_bad_frame(prefill: Prefill) -> None:
    """C01: nothing else is raised, and no text of a peer is longer than a log can show."""
    layout = msgspec.to_builtins(prefill[0].images().layout)
    readers: tuple[tuple[Callable[[bytes], Greeting | Verdict], Any], ...] = (
        (decode_greeting, {"protocol": KV_PROTOCOL, "run": "r", "layout": layout}),
        (decode_verdict, {"error": "no"}),
    )
    for read, right in readers:
        taken = []
        for frame in damaged(right, msgspec.msgpack.encode, 10_000):
            with contextlib.suppress(BadFrameError):
                taken.append(read(frame))
        assert len(taken) > 100, "the damage leaves next to nothing to read"
        assert all(len(one.run if isinstance(one, Greeting) else one.error or "") <= 2048 for one in taken)


def test_a_peer_that_sends_damaged_bytes_ends_its_own_connection_alone(
    decode: Decode, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C01: the next peer's pages are taken, and no page changes that was not ordered."""
    monkeypatch.setattr(kv_receiver, "EARLY_WAIT_S", 0.01)
    stage, receiver = decode
    layout = stage.images().layout
    greeting = framed(encode(Greeting(KV_PROTOCOL, receiver.address.run, layout)))
    page = HEADER.pack(PAGE, 1, 0) + stage.image(0)
    right = greeting + page * 2 + HEADER.pack(END, 1, 0)
    chance = random.Random(1)
    stage.fill(7, 3)
    before = stage.image(7)
    for _ in range(200):
        data = bytearray(right)
        for _ in range(chance.randint(1, 4)):
            # Most of it is the greeting and the headers.
            data[chance.choice((chance.randrange(len(data)), chance.randrange(len(greeting) + HEADER.size)))] ^= (
                chance.randint(1, 255)
            )
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with connection, contextlib.suppress(OSError):
            connection.settimeout(WAIT_S)
            connection.connect(str(receiver.address.place))
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            # Damage can leave a right END of transfer 1: it must be over before the transfer is ordered.
            while connection.recv(4096):
                pass
    assert stage.image(7) == before
    receiver.order(receive(1, 4))
    peer = opened(Prefiller(receiver.address, layout))
    peer.bring(1, 0, before)
    assert peer.end(1) is None
    assert stage.answer() == PagesReceived(transfer=1, pages=1)
    assert stage.image(4) == before
