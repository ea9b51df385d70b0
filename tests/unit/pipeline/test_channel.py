"""Channels between the scheduler and its stages: whole frames in order, no writer waits for a reader, ends are seen."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from engine.core.frames import BadFrameError
from engine.pipeline.channel import MAX_FRAME_BYTES, READ_BYTES, StageChannel, StageChannels, hand_over

WAIT_S = 30.0
# Around a length's four bytes, around one read, and beyond what a socket takes at once.
SIZES = (0, 1, 3, 4, READ_BYTES - 5, READ_BYTES - 4, READ_BYTES - 3, 5 * READ_BYTES, 100, 0)
FRAMES = [bytes([number % 256]) * size for number, size in enumerate(SIZES)]
MORE_THAN_A_SOCKET_TAKES = [bytes([number]) * 40_000 for number in range(50)]

Pair = tuple[StageChannels, StageChannel]


@pytest.fixture
def addresses(private_dir: Path) -> list[Path]:
    return [private_dir / "stage-0", private_dir / "stage-1"]


@pytest.fixture
def pair(addresses: list[Path]) -> Iterator[Pair]:
    scheduler = StageChannels(addresses)
    stage = StageChannel(addresses[0])
    yield scheduler, stage
    stage.close()
    scheduler.close()


def receive(scheduler: StageChannels, count: int) -> list[bytes]:
    frames: list[bytes] = []
    while len(frames) < count:
        frames += scheduler.receive(WAIT_S)
    return frames


def is_readable(scheduler: StageChannels) -> bool:
    return bool(select.select([scheduler], [], [], 0)[0])


def test_frames_of_every_size_arrive_whole_and_in_order(pair: Pair) -> None:
    scheduler, stage = pair
    with ThreadPoolExecutor(1) as pool:
        sent = pool.submit(lambda: [stage.send(frame) for frame in FRAMES])
        assert receive(scheduler, len(FRAMES)) == FRAMES
        sent.result()
        for frame in FRAMES:
            scheduler.send(0, frame)
        received = pool.submit(lambda: [stage.receive() for _ in FRAMES])
        while not received.done():
            assert scheduler.receive(0.01) == []
    assert received.result() == FRAMES


def test_a_stage_that_does_not_read_delays_no_other(pair: Pair) -> None:
    """A03: the scheduler goes on, and is woken when there is room for what was left."""
    scheduler, stage = pair
    for frame in MORE_THAN_A_SOCKET_TAKES:
        scheduler.send(0, frame)
    assert not is_readable(scheduler)
    first = stage.receive()
    with ThreadPoolExecutor(1) as pool:
        rest = pool.submit(lambda: [stage.receive() for _ in MORE_THAN_A_SOCKET_TAKES[1:]])
        while not rest.done():
            assert scheduler.receive(0.01) == []
    assert [first, *rest.result()] == MORE_THAN_A_SOCKET_TAKES
    assert not is_readable(scheduler), "room that is not needed wakes the scheduler"


def test_what_was_sent_before_a_stage_connects_reaches_it(addresses: list[Path]) -> None:
    scheduler = StageChannels(addresses)
    scheduler.broadcast(b"early")
    assert not is_readable(scheduler)
    stages = [StageChannel(address) for address in addresses]
    assert is_readable(scheduler)
    scheduler.send(1, b"late")
    assert scheduler.receive(WAIT_S) == []
    assert [stage.receive() for stage in stages] == [b"early", b"early"]
    assert stages[1].receive() == b"late"
    for end in (*stages, scheduler):
        end.close()


def test_a_stage_connects_to_a_scheduler_that_comes_later(addresses: list[Path]) -> None:
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(StageChannel, addresses[0])
        scheduler = StageChannels(addresses)
        stage = connecting.result(WAIT_S)
    stage.send(b"here")
    assert receive(scheduler, 1) == [b"here"]
    stage.close()
    scheduler.close()


def test_what_a_killed_server_left_is_replaced(addresses: list[Path]) -> None:
    """A folder that was lent to a server still has its sockets when it was killed."""
    StageChannels(addresses).close()
    assert all(address.is_socket() for address in addresses)
    scheduler = StageChannels(addresses)
    stage = StageChannel(addresses[1])
    scheduler.broadcast(b"a plan")
    assert stage.receive() == b"a plan"
    stage.close()
    scheduler.close()


def test_a_length_beyond_the_bound_is_not_waited_for(pair: Pair) -> None:
    """A05, A06: the stream after it cannot be decoded: the stage counts as broken, and earlier frames are read."""
    scheduler, stage = pair
    stage.send(b"before")
    stage._socket.sendall((MAX_FRAME_BYTES + 1).to_bytes(4, "little"))
    assert receive(scheduler, 1) == [b"before"]
    while not scheduler.broken:
        assert scheduler.receive(WAIT_S) == []
    assert scheduler.broken == {
        0: f"a frame must have at most {MAX_FRAME_BYTES} bytes, one of {MAX_FRAME_BYTES + 1} was announced"
    }
    assert stage.receive() is None


def test_a_stage_does_not_wait_for_a_length_beyond_the_bound(pair: Pair) -> None:
    scheduler, stage = pair
    scheduler.broadcast(b"")
    assert stage.receive() == b""
    connection = scheduler._ends[0].connection
    assert connection is not None
    connection.sendall(b"\xff\xff\xff\xff")
    with pytest.raises(BadFrameError, match="one of 4294967295 was announced"):
        stage.receive()


def test_a_stage_that_is_gone_is_not_heard_of_again(pair: Pair) -> None:
    """A03, A06: its final message arrives, its end wakes the scheduler once, and what is sent to it is dropped."""
    scheduler, stage = pair
    for frame in MORE_THAN_A_SOCKET_TAKES:
        scheduler.send(0, frame)
    stage.send(b"final message")
    stage.close()
    assert receive(scheduler, 1) == [b"final message"]
    while is_readable(scheduler):
        assert scheduler.receive(0) == []
    scheduler.send(0, b"unread")
    assert not is_readable(scheduler)
    assert scheduler.receive(0.01) == []


def test_a_stage_reads_what_is_left_of_a_scheduler_that_is_gone(pair: Pair) -> None:
    """A06: also a poll for nothing but errors sees the end, and plans do not wake it."""
    scheduler, stage = pair
    scheduler.send(0, b"a plan")
    ends = select.poll()
    ends.register(stage, 0)
    assert ends.poll(0) == []
    scheduler.close()
    assert ends.poll(0)
    assert stage.receive() == b"a plan"
    assert stage.receive() is None
    stage.send(b"unread")
    assert stage.receive() is None


def test_a_connection_that_is_handed_over_is_like_any_other() -> None:
    """Frames that were sent before reach it; the end of who hands over is no end of what was handed."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    scheduler = StageChannels([None, None], ours)
    scheduler.broadcast(b"early")
    assert not is_readable(scheduler)
    stage, connection = socket.socketpair()
    hand_over(theirs, 1, connection)
    assert connection.fileno() == -1
    assert scheduler.receive(WAIT_S) == []
    stage.sendall(b"\x02\x00\x00\x00hi")
    theirs.close()
    assert receive(scheduler, 1) == [b"hi"]
    scheduler.send(1, b"late")
    assert stage.recv(100) == b"\x05\x00\x00\x00early\x04\x00\x00\x00late"
    while is_readable(scheduler):
        assert scheduler.receive(0) == []
    hand_over(theirs, 0, stage)  # The scheduler's side is gone for it, which is no error.
    scheduler.close()
