"""Orders to a preloaded parent from a client that is gone, and news in an order that nobody chose."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from engine.process.control import Gathering
from engine.process.links.endpoint import Endpoint
from engine.server.launch.parent_process import ForkingParent
from engine.server.launch.preload import Forked, ServeRequest, ServerProcess


def test_an_order_of_a_client_that_was_killed_starts_nothing_and_leaves_no_folder(tmp_path: Path) -> None:
    """A06: it was killed while the parent imported torch, with its order on the way."""
    folder = tmp_path / "engine-1"
    folder.mkdir()
    request = ServeRequest(
        settings="{}",
        private_dir=str(folder),
        log_path=str(tmp_path / "log"),
        working_dir=str(tmp_path),
        import_path=(),
        remove_private_dir=True,
    )
    orders, client = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    lifeline, theirs = socket.socketpair()
    with orders, lifeline, theirs:
        with client:
            socket.send_fds(client, [msgspec.msgpack.encode(request)], [theirs.fileno(), theirs.fileno()])
        parent = ForkingParent(orders)
        parent.take_order()
        theirs.close()
        # Nothing of the order is open any more, no server was forked, and the parent's work is over.
        assert lifeline.recv(1) == b""
        assert (parent.over, parent.servers) == (True, {})
        parent.end_servers()
        parent.remove_folders()
    assert not folder.exists()


def test_a_server_may_speak_before_its_parent_says_that_it_was_forked(tmp_path: Path) -> None:
    """A06: on a busy machine the child runs first; what it said is not lost."""
    gathering = Gathering(join=Endpoint(host="127.0.0.1", port=1), secret_file="secret", stages=2)
    lifeline, theirs = socket.socketpair()
    news, parent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with lifeline, theirs, news, parent:
        for said in (gathering, Forked(pid=17)):
            parent.send(msgspec.msgpack.encode(said))
        server = ServerProcess(lifeline, news, tmp_path)
        assert (server.pid, server.wait_gathering(1.0)) == (17, gathering)


def test_a_server_that_ends_just_before_it_is_killed_does_no_harm(tmp_path: Path) -> None:
    if not (ended := os.fork()):
        os._exit(0)
    os.waitpid(ended, 0)
    lifeline, theirs = socket.socketpair()
    news, parent = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with lifeline, theirs, news, parent:
        parent.send(msgspec.msgpack.encode(Forked(pid=ended)))
        server = ServerProcess(lifeline, news, tmp_path)
        # As when the lifeline was looked at before the end.
        for end in (server.drain, server.terminate, server.kill):
            end()
