"""The control pipe: typed messages, and a closed pipe that is never silence."""

from __future__ import annotations

import os
import struct
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import msgspec
import pytest

from engine.core.errors import CheckpointError, ProcessDiedError
from engine.process.control import (
    MAX_CONTROL_BYTES,
    Control,
    Dying,
    ProcessDied,
    Ready,
    Serving,
    Shutdown,
    decode_child_message,
)


@pytest.fixture
def pipe():
    ours, theirs = Pipe()
    control = Control(theirs)
    yield control, ours
    control.close()
    ours.close()


def _say(supervisor: Connection, message: msgspec.Struct) -> None:
    supervisor.send_bytes(msgspec.msgpack.encode(message))


def test_messages_go_both_ways(pipe) -> None:
    control, supervisor = pipe
    control.send(Ready())
    assert decode_child_message(supervisor.recv_bytes()) == Ready()
    _say(supervisor, ProcessDied(process="stage-1", cause="killed"))
    assert control.receive() == ProcessDied(process="stage-1", cause="killed")


def test_nothing_said_is_none(pipe) -> None:
    control, _ = pipe
    assert control.receive(0) is None


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"garbage", b"\x81\xa4type\xa7Serv\xffng"])
def test_what_is_no_message_is_dropped(pipe, frame: bytes) -> None:
    """A05: and what comes after it is heard."""
    control, supervisor = pipe
    supervisor.send_bytes(frame)
    assert control.receive() is None
    supervisor.send_bytes(frame)
    serving = Serving(base_url="http://x", pids={})
    _say(supervisor, serving)
    assert control.wait_until_serving(1.0) == serving


def test_a_length_beyond_the_bound_is_the_end_of_the_pipe(pipe) -> None:
    """A05: it is not waited for what was announced."""
    control, supervisor = pipe
    os.write(supervisor.fileno(), struct.pack("!i", MAX_CONTROL_BYTES + 1))
    with pytest.raises(ProcessDiedError, match="supervisor"):
        control.receive()


def test_closed_pipe_is_the_supervisors_death(pipe) -> None:
    """A dead or late stage ends every stream with an error (A06)."""
    control, supervisor = pipe
    supervisor.close()
    with pytest.raises(ProcessDiedError, match="supervisor"):
        control.receive()
    control.send(Ready())  # The other end is closed, and that must not raise.


def test_waiting_until_serving(pipe) -> None:
    control, supervisor = pipe
    serving = Serving(base_url="http://x", pids={"scheduler": 1})
    _say(supervisor, serving)
    assert control.wait_until_serving(1.0) == serving


@pytest.mark.parametrize(
    ("message", "process"), [(ProcessDied(process="stage-1", cause="x"), "stage-1"), (Shutdown(), "supervisor")]
)
def test_waiting_until_serving_ends_with_a_death(pipe, message: msgspec.Struct, process: str) -> None:
    """An end signals before it waits, within a bound; what failed never says that it is ready (A07)."""
    control, supervisor = pipe
    _say(supervisor, message)
    with pytest.raises(ProcessDiedError) as caught:
        control.wait_until_serving(1.0)
    assert caught.value.process == process


def test_waiting_until_serving_is_bounded(pipe) -> None:
    control, _ = pipe
    with pytest.raises(TimeoutError, match="not every process"):
        control.wait_until_serving(0.001)


def test_dying_carries_error_traceback_and_reason() -> None:
    own = Dying.of(CheckpointError("no such folder"))
    assert (own.error, own.refusal) == ("engine.core.errors.CheckpointError: no such folder", "no such folder")
    assert own.expected
    assert own.victim_of is None
    victim = Dying.of(ProcessDiedError("stage-2", "killed"))
    assert (victim.victim_of, victim.victim_cause) == ("stage-2", "killed")
    other = Dying.of(ZeroDivisionError("x"))
    assert (other.expected, other.refusal) == (False, "")
