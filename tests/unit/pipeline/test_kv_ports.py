"""The ports of prefill and decode engines: whole pages or none, one answer an order, here and between machines."""

from __future__ import annotations

import contextlib
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kv_peers import (
    ORIGIN,
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

from engine.core.errors import ConfigError, StartupError
from engine.core.messages import PagesReceived, PagesSent
from engine.core.plan import SendPages, StopTransfer
from engine.model.page_image import PageImages
from engine.model.page_layout import KVOrigin
from engine.process.kv_addresses import KVAddress, kv_addresses, parse_kv_address
from engine.process.links.connection import LinkAddress
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import bound_at
from engine.process.links.proof import Claim, Role
from engine.process.links.secret import Secret

SECRET = Secret("a secret of the fleet, for tests")
LOCAL = Endpoint("127.0.0.1", 0)


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
        ({"page_tokens": 32}, "page_size must be the same on both engines, got 32 on the sender and 16"),
        ({"dtype": torch.float32}, "got 2 x float32 (2, 3, 16, 8) on the sender and 2 x bfloat16 (2, 3, 16, 8)"),
        ({"layers": 3}, "parts must be the same on both engines, got 2 x bfloat16 (3, 3, 16, 8)"),
        (
            {"origin": KVOrigin((("hidden_size", "64"), ("rope_theta", "500000.0")), "1a")},
            "rope_theta of the model must be the same on both engines, got 500000.0 on the sender and 10000.0",
        ),
        (
            {"origin": KVOrigin((*ORIGIN.fields, ("rope_scaling", "null")), "1a")},
            "rope_scaling of the model must be the same on both engines, got null on the sender and None",
        ),
        (
            {"origin": KVOrigin(ORIGIN.fields, "2b")},
            "the weights of the model must be the same on both engines, got 2b on the sender and 1a on the receiver",
        ),
        ({"sanitize": False}, "sanitizer_root must be the same on both engines, got None on the sender and"),
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
    assert "stage must be the same on both engines, got 1 on the sender and 0" in str(source.answer())
    sender.order(send(2, receiver.address, 0))
    assert "the decode engine must have 2 stages, as this engine has, got 1" in str(source.answer())


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
    assert f"must be run '{first.address.run}', but has restarted and is '{second.address.run}'" in answer.error
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
    assert "has no open transfer 1" in str(peer.end(1))
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


def test_a_sender_that_starts_over_closes_its_connections(
    opened: Open, private_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An order that was stopped in the middle sends nothing afterwards, and the next order gets a new connection."""
    monkeypatch.setattr("engine.pipeline.kv_sender.PROGRESS_TIMEOUT_S", 2 * WAIT_S)
    closed = threading.Event()

    def read_to_the_end(connection: Any) -> None:
        while connection.recv(1 << 16):
            continue
        closed.set()

    peer = opened(Decoder(private_dir, read_to_the_end))
    source = SmallStage()
    sender = opened(source.sender())
    sender.order(send(1, peer.address, 0))
    assert peer.has_greeted.wait(WAIT_S)
    sender.order(StopTransfer(1))
    assert source.answer() == PagesSent(transfer=1, error="stage 0: the transfer was stopped")
    sender.forget()
    assert closed.wait(WAIT_S)
    assert source.answers.empty()


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
    assert "an engine on another machine accepts KV only from peers with its secret" in answers[0]
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
    assert caplog.text.count("where stage 0 receives KV") == 2


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
