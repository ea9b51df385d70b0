"""The ports of prefill and decode engines: whole pages or none, one answer an order, and no peer that costs a stage."""

from __future__ import annotations

import contextlib
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kv_peers import (
    WAIT_S,
    Decoder,
    Prefiller,
    SmallStage,
    no_thread_is_left,
    receive,
    send,
)
from partners import damaged

from engine.core.errors import ConfigError, StartupError
from engine.core.frames import BadFrameError, framed
from engine.core.messages import PagesReceived, PagesSent, encode
from engine.core.plan import SendPages, StopTransfer
from engine.model.page_image import PageImages
from engine.pipeline import kv_receiver, kv_sender
from engine.pipeline.kv_frames import END, HEADER, KV_PROTOCOL, PAGE, Greeting, Verdict, decode_greeting, decode_verdict
from engine.pipeline.kv_receiver import KVReceiver
from engine.pipeline.kv_sender import KVSender
from engine.process.kv_addresses import KVAddress, kv_addresses, parse_kv_address
from engine.process.links.connection import LinkAddress
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import bound_at
from engine.process.links.proof import Claim, Role
from engine.process.links.secret import Secret

SECRET = Secret("a secret of the fleet, for tests")
LOCAL = Endpoint("127.0.0.1", 0)

Open = Callable[[Any], Any]


@pytest.fixture
def opened() -> Iterator[Open]:
    """Closes what a test opens, last first; afterwards no thread of a port may be left."""
    ends: list[Any] = []

    def note(end: Any) -> Any:
        ends.append(end)
        return end

    with no_thread_is_left():
        yield note
        for end in reversed(ends):
            end.close()


@pytest.fixture
def decode(opened: Open, private_dir: Path) -> tuple[SmallStage, KVReceiver]:
    stage = SmallStage()
    return stage, opened(stage.receiver(private_dir))


@pytest.fixture
def prefill(opened: Open) -> tuple[SmallStage, KVSender]:
    stage = SmallStage()
    return stage, opened(stage.sender())


Decode = tuple[SmallStage, KVReceiver]
Prefill = tuple[SmallStage, KVSender]


def images(stage: SmallStage, *pages: int) -> list[bytes]:
    return [stage.image(page) for page in pages]


# -- what is right --


def test_pages_arrive_with_their_record_where_they_were_ordered(decode: Decode, prefill: Prefill) -> None:
    """In parts, as a prompt is computed; nothing else is written."""
    (target, receiver), (source, sender) = decode, prefill
    for page in range(8):
        source.fill(page, page + 1)
    before = images(target, 0, 2, 3, 5, 7)
    receiver.order(receive(1, 6, 1, 4))
    sender.order(send(1, receiver.address, 3, first=0))
    sender.order(send(2, receiver.address, 0, 5, first=1))
    assert [source.answer(), source.answer()] == [PagesSent(transfer=1), PagesSent(transfer=2)]
    assert target.answer() == PagesReceived(transfer=1, pages=3)
    assert images(target, 6, 1, 4) == images(source, 3, 0, 5)
    assert images(target, 0, 2, 3, 5, 7) == before


def test_the_front_end_finds_every_address(opened: Open, private_dir: Path) -> None:
    ports = [opened(SmallStage(stage=number, stages=2).receiver(private_dir)) for number in range(2)]
    found = kv_addresses(private_dir, 2)
    assert [parse_kv_address(text) for text in found] == [port.address for port in ports]
    assert len({port.address.run for port in ports}) == 2
    with pytest.raises(FileNotFoundError):
        kv_addresses(private_dir, 3)


def test_nothing_is_left_of_a_port(private_dir: Path) -> None:
    stage = SmallStage()
    with no_thread_is_left():
        receiver = stage.receiver(private_dir)
        with contextlib.closing(Prefiller(receiver.address, stage.images().layout)) as peer:
            receiver.order(receive(1, 0))
            receiver.close()
            receiver.close()
            assert peer.is_closed()
    assert list(private_dir.iterdir()) == []
    assert stage.answers.empty()


@pytest.mark.parametrize(
    "text", ["", "unix:/a", "unix:#run", "tcp:host#run", "tcp:1.2.3.4:70000#run", "udp:1.2.3.4:5#run", "/a#run"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="an address of KV must be"):
        parse_kv_address(text)


def test_addresses_are_read_as_they_are_written() -> None:
    for place in (Path("/tmp/a#b/kv-0"), Endpoint("::1", 4), Endpoint("host", 65535)):
        address = KVAddress(place, "0123")
        assert parse_kv_address(str(address)) == address


# -- who differs --


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"page_tokens": 32}, "page_size must be the same on both engines, got 32 where it is sent and 16"),
        ({"dtype": torch.float32}, "got 2 x float32 (2, 3, 16, 8) where it is sent and 2 x bfloat16 (2, 3, 16, 8)"),
        ({"layers": 3}, "parts must be the same on both engines, got 2 x bfloat16 (3, 3, 16, 8)"),
        ({"sanitize": False}, "sanitizer_root must be the same on both engines, got None where it is sent and"),
    ],
)
def test_another_layout_is_refused_with_both_values(
    decode: Decode, opened: Open, values: dict[str, Any], words: str
) -> None:
    target, receiver = decode
    source = SmallStage(**values)
    sender = opened(source.sender())
    receiver.order(receive(1, 0))
    sender.order(send(5, receiver.address, 0))
    answer = source.answer()
    assert isinstance(answer, PagesSent)
    assert words in str(answer.error)
    assert answer.transfer == 5
    receiver.order(StopTransfer(1))
    assert target.answer() == PagesReceived(transfer=1, pages=0)


def test_other_stages_are_refused(decode: Decode, opened: Open) -> None:
    _, receiver = decode
    source = SmallStage(stage=1, stages=2)
    sender = opened(source.sender())
    sender.order(SendPages(1, (0,), ("unix:/nowhere#x", str(receiver.address)), 1, 0))
    assert "stage must be the same on both engines, got 1 where it is sent and 0" in str(source.answer())
    sender.order(send(2, receiver.address, 0))
    assert "the decode engine must have 2 stages as this one has, got 1" in str(source.answer())


def test_weights_that_change_on_one_side_are_noticed_on_a_connection_that_is_open(
    decode: Decode, prefill: Prefill
) -> None:
    """The root of the fingerprints changes with them; once both have changed, pages pass again."""
    (target, receiver), (source, sender) = decode, prefill
    receiver.order(receive(1, 0))
    sender.order(send(1, receiver.address, 0))
    assert source.answer() == PagesSent(transfer=1)
    assert target.answer() == PagesReceived(transfer=1, pages=1)
    target.record.change_weights()
    receiver.order(receive(2, 0))
    sender.order(send(2, receiver.address, 0, to_transfer=2))
    assert "sanitizer_root must be the same" in str(source.answer())
    source.record.change_weights()
    sender.order(send(3, receiver.address, 0, to_transfer=2))
    assert source.answer() == PagesSent(transfer=3)
    assert target.answer() == PagesReceived(transfer=2, pages=1)


def test_a_decode_engine_that_was_started_again_takes_nothing_for_the_one_before(
    prefill: Prefill, private_dir: Path, opened: Open
) -> None:
    source, sender = prefill
    first = SmallStage().receiver(private_dir)
    first.order(receive(1, 0, 1))
    sender.order(send(1, first.address, 0))
    assert source.answer() == PagesSent(transfer=1)
    first.close()
    again = SmallStage()
    second = opened(again.receiver(private_dir))
    second.order(receive(1, 0))
    before = images(again, 0)
    for number in (2, 3):
        sender.order(send(number, first.address, 0))
        assert isinstance(answer := source.answer(), PagesSent)
        assert answer.error is not None
    assert f"must be run '{first.address.run}', but was started again and is '{second.address.run}'" in answer.error
    assert images(again, 0) == before
    sender.order(send(4, second.address, 0))
    assert (source.answer(), again.answer()) == (PagesSent(transfer=4), PagesReceived(transfer=1, pages=1))


# -- what is stopped --


def test_nothing_is_written_after_a_stop(decode: Decode, opened: Open) -> None:
    """Of four pages the first and the third arrive, of which the third is useless; the others are late."""
    target, receiver = decode
    peer = opened(Prefiller(receiver.address, target.images().layout))
    page = bytes([7]) * target.images().image_bytes
    receiver.order(receive(1, 4, 5, 6, 7))
    for place in (0, 2):
        peer.bring(1, place, page)
    assert peer.end(1) is None
    receiver.order(StopTransfer(1))
    assert target.answer() == PagesReceived(transfer=1, pages=1)
    for number in range(8):
        target.fill(number, 3)
    before = images(target, *range(8))
    for place in (1, 3, 0, 99):
        peer.bring(1, place, page)
    assert "receives nothing for transfer 1, or does not any more" in str(peer.end(1))
    assert images(target, *range(8)) == before
    receiver.order(StopTransfer(1))
    receiver.order(receive(2, 0))
    peer.bring(2, 0, page)
    assert target.answer() == PagesReceived(transfer=2, pages=1)
    receiver.order(StopTransfer(2))
    assert target.answers.empty()


def test_a_stop_waits_for_the_page_that_is_being_written(
    decode: Decode, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes in the middle of the write, which must end before the answer."""
    target, receiver = decode
    peer = opened(Prefiller(receiver.address, target.images().layout))
    write, begun, go_on = PageImages.write, threading.Event(), threading.Event()
    written: list[int] = []

    def slow(self: PageImages, page: int, image: torch.Tensor) -> None:
        begun.set()
        assert go_on.wait(WAIT_S)
        write(self, page, image)
        written.append(page)

    monkeypatch.setattr(PageImages, "write", slow)
    receiver.order(receive(1, 4, 5))
    peer.bring(1, 0, bytes(target.images().image_bytes))
    assert begun.wait(WAIT_S)
    stop = threading.Thread(target=receiver.order, args=(StopTransfer(1),))
    stop.start()
    stop.join(0.05)
    assert stop.is_alive()
    go_on.set()
    stop.join(WAIT_S)
    assert target.answer() == PagesReceived(transfer=1, pages=1)
    assert written == [4]


def test_a_send_to_a_peer_that_never_reads_is_stopped_at_once(
    opened: Open, private_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what waits behind it too; pages are not read any more."""
    stuck = opened(Decoder(private_dir))
    source = SmallStage(page_tokens=1024, layers=16)
    sender = opened(source.sender())
    # 12 MB: more than any socket takes.
    sender.order(send(1, stuck.address, *range(8)))
    sender.order(send(2, stuck.address, 0))
    assert stuck.has_greeted.wait(WAIT_S)
    for number in (2, 1):
        sender.order(StopTransfer(number))
        assert source.answer() == PagesSent(transfer=number, error="stage 0: the transfer was stopped")
    monkeypatch.setattr(PageImages, "read", lambda *_: pytest.fail("a page was read after the answer"))
    sender.order(StopTransfer(1))
    assert source.answers.empty()


# -- who is gone, slow or wrong --


def test_a_send_without_progress_fails_and_what_waits_behind_it_too(
    opened: Open, private_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "PROGRESS_TIMEOUT_S", 0.1)
    stuck = opened(Decoder(private_dir))
    source = SmallStage(page_tokens=1024, layers=16)
    sender = opened(source.sender())
    sender.order(send(1, stuck.address, *range(8)))
    sender.order(send(2, stuck.address, 0))
    words = f"stage 0: KV could not be sent to {stuck.address}: it has taken or confirmed nothing for 0.1 s"
    assert [source.answer(), source.answer()] == [PagesSent(transfer=number, error=words) for number in (1, 2)]


def test_a_peer_that_takes_all_and_confirms_nothing_fails(
    opened: Open, private_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_sender, "PROGRESS_TIMEOUT_S", 0.1)
    silent = opened(Decoder(private_dir))
    source = SmallStage()
    sender = opened(source.sender())
    sender.order(send(1, silent.address, 0))
    assert "taken or confirmed nothing" in str(source.answer())


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
        assert "receives nothing for transfer 77" in str(peer.end(77))
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
    assert "receives nothing for transfer 1" in str(peer.end(1))
    monkeypatch.setattr(kv_receiver, "EARLY_WAIT_S", WAIT_S)
    peer.bring(1, 0, bytes(target.images().image_bytes))


@pytest.mark.parametrize(
    ("places", "words"), [((0, 0), "page 0 of transfer 1 came twice"), ((3,), "page 3 of transfer 1 of 3 does not")]
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
    assert caplog.text.count("closed the connection by which") == 2
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


# -- between machines --


def test_kv_comes_over_tcp_from_those_who_have_the_secret(opened: Open, private_dir: Path) -> None:
    target = SmallStage()
    receiver = opened(target.receiver(private_dir, endpoint=LOCAL, secret=SECRET))
    assert kv_addresses(private_dir, 1)[0].startswith("tcp:127.0.0.1:")
    receiver.order(receive(1, 5))
    sources = [SmallStage() for _ in range(3)]
    for number, (source, secret) in enumerate(
        zip(sources, (None, Secret("of another fleet, alas"), SECRET), strict=True)
    ):
        source.fill(3, 3)
        sender = opened(source.sender(secret=secret))
        sender.order(send(number, receiver.address, 3))
    answers = [str(source.answer()) for source in sources]
    assert "an engine on another machine takes KV from those who prove its secret" in answers[0]
    assert "it did not accept the proof; give both sides the same secret file" in answers[1]
    assert answers[2] == str(PagesSent(transfer=2))
    assert target.answer() == PagesReceived(transfer=1, pages=1)
    assert images(target, 5) == images(sources[2], 3)


def test_one_with_the_secret_for_something_else_is_let_go(
    opened: Open, private_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = opened(SmallStage().receiver(private_dir, endpoint=LOCAL, secret=SECRET))
    place = receiver.address.place
    with caplog.at_level(logging.WARNING):
        for claim in (Claim(Role.HIDDEN, 0), Claim(Role.KV, 1)):
            stranger = opened(LinkAddress(place, SECRET, claim, WAIT_S).connect())
            stranger.settimeout(WAIT_S)
            assert stranger.recv(1) == b""
    assert caplog.text.count("where stage 0 takes KV") == 2


def test_the_stages_of_an_engine_listen_at_ports_in_a_row(opened: Open, private_dir: Path) -> None:
    free = bound_at(LOCAL, "test")
    port = free.getsockname()[1]
    free.close()
    stage = SmallStage(stage=1, stages=2)
    receiver = opened(stage.receiver(private_dir, endpoint=Endpoint("127.0.0.1", port - 1), secret=SECRET))
    assert receiver.address.place == Endpoint("127.0.0.1", port)
    with pytest.raises(StartupError, match="the endpoint of KV must be an address of this machine with a free port"):
        stage.receiver(private_dir, endpoint=Endpoint("127.0.0.1", port - 1), secret=SECRET)


def test_no_descriptor_is_left_of_ports(private_dir: Path) -> None:
    def play() -> None:
        target, source = SmallStage(), SmallStage()
        receiver, sender = target.receiver(private_dir), source.sender()
        receiver.order(receive(1, 0))
        sender.order(send(1, receiver.address, 0))
        assert (source.answer(), target.answer()) == (PagesSent(transfer=1), PagesReceived(transfer=1, pages=1))
        sender.close()
        receiver.close()

    play()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        play()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


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
