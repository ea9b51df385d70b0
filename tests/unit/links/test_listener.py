"""The listening end over loopback: a peer with a proof gets in, regardless of the others."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from engine.core.errors import StartupError
from engine.process.links import connection, listener
from engine.process.links.connection import LinkAddress
from engine.process.links.endpoint import Endpoint
from engine.process.links.listener import MAX_UNPROVED, PROOF_TIMEOUT_S, Link, LinkListener, bound_at
from engine.process.links.proof import ANSWER_BYTES, GREETING_BYTES, Claim, LinkError, Role, answer_to
from engine.process.links.secret import Secret

SECRET = Secret("a secret of the run, for tests")
CLAIM = Claim(Role.HIDDEN, 1)
SILENCE_S = 5.0
WAIT_S = 30.0
LOCAL = Endpoint("127.0.0.1", 0)


@pytest.fixture
def gate() -> Iterator[LinkListener]:
    opened = LinkListener(bound_at(LOCAL, "listen"), SECRET, silence_s=SILENCE_S)
    yield opened
    opened.close()


def address(gate: LinkListener, secret: Secret = SECRET, claim: Claim = CLAIM) -> LinkAddress:
    return LinkAddress(gate.endpoint, secret, claim, SILENCE_S)


def raw(gate: LinkListener) -> socket.socket:
    peer = socket.create_connection((gate.endpoint.host, gate.endpoint.port), WAIT_S)
    peer.settimeout(WAIT_S)
    return peer


def take(gate: LinkListener, now: float | None = None) -> list[Link]:
    """Wait for the next event and return the links that it completes."""
    assert select.select([gate], [], [], WAIT_S)[0]
    return gate.take(time.monotonic() if now is None else now)


def take_one(gate: LinkListener) -> Link:
    while not (links := take(gate)):
        pass
    (link,) = links
    return link


def test_a_link_carries_bytes_both_ways_and_sends_at_once(gate: LinkListener) -> None:
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(address(gate).connect)
        link = take_one(gate)
        theirs = connecting.result(WAIT_S)
    assert link.claim == CLAIM
    assert link.peer == f"127.0.0.1:{theirs.getsockname()[1]}"
    for end, other in ((link.connection, theirs), (theirs, link.connection)):
        end.sendall(b"word")
        assert other.recv(10) == b"word"
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert end.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == SILENCE_S * 1000
        assert end.gettimeout() is None
    link.connection.close()
    theirs.close()


def test_silent_peers_keep_no_other_out(gate: LinkListener, caplog: pytest.LogCaptureFixture) -> None:
    """A05: more of them than are waited for, and one that sends a byte now and then."""
    silent = [raw(gate) for _ in range(MAX_UNPROVED + 1)]
    slow = silent[-1]
    slow.sendall(b"L")
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(address(gate).connect)
        take_one(gate).connection.close()
        connecting.result(WAIT_S).close()
    assert "too many other peers connected after it" in caplog.text
    due = gate.due()
    assert due is not None
    assert due <= time.monotonic() + PROOF_TIMEOUT_S
    assert gate.take(due + PROOF_TIMEOUT_S) == []
    assert gate.due() is None
    assert f"it did not send its proof within {PROOF_TIMEOUT_S} s" in caplog.text
    assert len(slow.recv(GREETING_BYTES)) == GREETING_BYTES
    # What it had sent was not all read, so that its end may be a reset.
    with contextlib.suppress(ConnectionResetError):
        assert slow.recv(1) == b""
    for peer in silent:
        peer.close()


def test_not_a_byte_after_the_proof_is_read(gate: LinkListener) -> None:
    peer = raw(gate)
    assert take(gate) == []
    greeting = peer.recv(GREETING_BYTES)
    answer = answer_to(greeting, SECRET, CLAIM)
    peer.sendall(answer[:10])
    assert take(gate) == []
    peer.sendall(answer[10:] + b"and more")
    link = take_one(gate)
    assert link.connection.recv(100) == b"and more"
    link.connection.close()
    peer.close()


def test_a_recorded_answer_is_dropped(gate: LinkListener, caplog: pytest.LogCaptureFixture) -> None:
    first, second = raw(gate), raw(gate)
    take(gate)
    answer = answer_to(first.recv(GREETING_BYTES), SECRET, CLAIM)
    assert len(answer) == ANSWER_BYTES
    take(gate)
    second.recv(GREETING_BYTES)
    second.sendall(answer)
    assert take(gate) == []
    assert second.recv(1) == b""
    assert "replays an old answer" in caplog.text
    first.close()
    second.close()


def test_one_is_waited_for_and_all_others_are_dropped(gate: LinkListener, caplog: pytest.LogCaptureFixture) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gate.wait_for, CLAIM)
        with pytest.raises(LinkError, match="did not accept the proof"):
            address(gate, Secret.new()).connect()
        other = address(gate, claim=Claim(Role.HIDDEN, 0)).connect()
        assert other.recv(1) == b""
        wanted = address(gate).connect()
        waiting.result(WAIT_S).sendall(b"you")
        assert wanted.recv(3) == b"you"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.WARNING]
    waiting.result().close()
    other.close()
    wanted.close()


def test_a_listener_without_the_secret_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The listener proves itself as well: nothing but the proof is sent to one that cannot."""
    gate = LinkListener(bound_at(LOCAL, "listen"), SECRET, silence_s=SILENCE_S)
    monkeypatch.setattr(listener.Challenge, "judge", lambda _, __: (CLAIM, bytes(32)))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(address(gate).connect)
        link = take_one(gate)
        with pytest.raises(LinkError, match="must have the run's secret"):
            connecting.result(WAIT_S)
    assert link.connection.recv(1) == b""
    link.connection.close()
    gate.close()


def test_what_does_not_listen_yet_refuses_and_what_never_speaks_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = bound_at(LOCAL, "listen")
    endpoint = Endpoint(*bound.getsockname()[:2])
    to_it = LinkAddress(endpoint, SECRET, CLAIM, SILENCE_S)
    with pytest.raises(ConnectionRefusedError):
        to_it.connect()
    bound.listen()
    monkeypatch.setattr(connection, "CONNECT_TIMEOUT_S", 0.05)
    with pytest.raises(LinkError, match=f"{endpoint} must be a listener of this run, but it sent nothing for 0.05 s"):
        to_it.connect()
    with ThreadPoolExecutor(1) as pool:
        bound.accept()[0].close()
        closing = pool.submit(lambda: bound.accept()[0].close())
        # As a relay does before one that does not listen yet: it is worth another try.
        with pytest.raises(ConnectionError):
            to_it.connect()
        closing.result(WAIT_S)
    with pytest.raises(
        StartupError, match=f"--listen must be an address of this machine with a free port, got {endpoint}"
    ):
        bound_at(endpoint, "--listen")
    bound.close()


@pytest.mark.parametrize(
    ("host", "error", "remedy"),
    [
        ("192.0.2.1", errno.EADDRNOTAVAIL, "no interface of this machine has it; use 127.0.0.1"),
        ("127.0.0.1", errno.EACCES, "ports below 1024 need root"),
        ("127.0.0.1", errno.EADDRINUSE, "stop the process that uses it"),
    ],
)
def test_an_address_that_cannot_be_had_has_its_own_remedy(
    host: str, error: int, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(socket.socket, "bind", refuse)
    with pytest.raises(StartupError, match=f"--host must be .* got {host}:7: {os.strerror(error)}; {remedy}"):
        bound_at(Endpoint(host, 7), "--host")


def test_peers_that_speak_while_others_take_their_place_break_nothing(gate: LinkListener) -> None:
    """A05: one look at the sockets finds new peers and words of old ones, which the new ones have pushed out.

    131 connections of one byte ended a server of joined stages: the oldest was dropped, and heard after that.
    """
    first = [raw(gate) for _ in range(MAX_UNPROVED)]
    while gate_size(gate) < MAX_UNPROVED:
        take(gate)
    later = [raw(gate) for _ in range(MAX_UNPROVED // 2)]
    for peer in (*first, *later):
        peer.sendall(b"L")
    for _ in later:
        assert take(gate) == []
    assert gate_size(gate) == MAX_UNPROVED
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(address(gate).connect)
        take_one(gate).connection.close()
        connecting.result(WAIT_S).close()
    for peer in (*first, *later):
        peer.close()


def test_peers_that_take_all_descriptors_give_way(gate: LinkListener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A05: else the listener stays readable without a way to take what is there, and its owner never sleeps."""
    silent = [raw(gate) for _ in range(3)]
    for _ in silent:
        take(gate)
    newest = raw(gate)
    accept, tries = gate._listener.accept, []

    class Scarce:
        def __getattr__(self, name: str) -> object:
            return getattr(listener_socket, name)

        def accept(self) -> object:
            tries.append(gate_size(gate))
            if tries[-1] == len(silent):
                raise OSError(errno.EMFILE, "Too many open files")
            return accept()

    listener_socket = gate._listener
    monkeypatch.setattr(gate, "_listener", Scarce())
    take(gate)
    assert tries == [len(silent), len(silent) - 1]
    assert len(newest.recv(GREETING_BYTES)) == GREETING_BYTES
    for peer in (*silent, newest):
        peer.close()


def gate_size(gate: LinkListener) -> int:
    return len(gate._unproved)
