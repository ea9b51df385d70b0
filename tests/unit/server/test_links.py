"""The relay of placed stages: what a slow, a cut, a healed and a dropped link do to bytes and connections.

A real relay, an echo server, sockets of this process. Bounds are from below, or for what must never come.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_lockstep.script.world import StageLink
from scripted_lockstep.tiers.server.links import LOOPBACK, Relay, Route, order_link

from engine.core.errors import EngineError

DELAY_S = 0.1
# What must not come is waited for so long; what must come, at most so long.
SILENCE_S = 0.2
PATIENCE_S = 30.0
BIG = bytes(range(256)) * 4096


class Echo:
    """Sends back what comes, and closes a connection when the other side does."""

    def __init__(self) -> None:
        self.listener = socket.create_server((LOOPBACK, 0))
        self.port = self.listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self._echo, args=(connection,), daemon=True).start()

    def _echo(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)


@pytest.fixture(scope="module")
def echo() -> Iterator[Echo]:
    one = Echo()
    yield one
    one.listener.close()


class Net:
    """A relay with two routes: through the link of stage 0 alone, and through those of stages 0 and 1."""

    def __init__(self, relay: Relay, orders: Path) -> None:
        self.relay = relay
        self.orders = orders
        self.opened: list[socket.socket] = []

    def connect(self, route: int = 0) -> socket.socket:
        connection = socket.create_connection((LOOPBACK, self.relay.ports[route]), PATIENCE_S)
        self.opened.append(connection)
        return connection

    def order(self, link: StageLink) -> None:
        order_link(self.orders, link)


@pytest.fixture(scope="module")
def whole_net(echo: Echo, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Net]:
    orders = tmp_path_factory.mktemp("relay") / "orders"
    routes = [Route(echo.port, stages) for stages in ((0,), (0, 1), (2,))]
    relay = Relay(routes, orders)
    yield Net(relay, orders)
    relay.close()
    assert not orders.exists()


@pytest.fixture
def net(whole_net: Net) -> Iterator[Net]:
    yield whole_net
    for stage in (0, 1):
        whole_net.order(StageLink(stage=stage))
    for connection in whole_net.opened:
        connection.close()


def say(connection: socket.socket, data: bytes) -> bytes:
    """Send, and read as many bytes back."""
    sender = threading.Thread(target=connection.sendall, args=(data,))
    sender.start()
    back = read(connection, len(data))
    sender.join(PATIENCE_S)
    return back


def read(connection: socket.socket, count: int) -> bytes:
    connection.settimeout(PATIENCE_S)
    data = b""
    while len(data) < count and (part := connection.recv(1 << 16)):
        data += part
    return data


def is_gone(connection: socket.socket) -> bool:
    """Whether nothing comes any more; a reset may be seen when something is sent, or when it is read."""
    try:
        connection.sendall(b"b")
        return not read(connection, 1)
    except ConnectionError:
        return True


def is_silent(connection: socket.socket) -> bool:
    connection.settimeout(SILENCE_S)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    return False


def test_bytes_come_as_they_were_sent(net: Net) -> None:
    connection = net.connect()
    assert say(connection, BIG) == BIG
    connection.shutdown(socket.SHUT_WR)
    assert read(connection, 1) == b""


@pytest.mark.parametrize("route", [0, 1])
def test_a_slow_link_delays_each_way_and_keeps_the_order(net: Net, route: int) -> None:
    connection = net.connect(route)
    assert say(connection, b"a") == b"a"
    net.order(StageLink(stage=0, delay_s=DELAY_S))
    begin = time.monotonic()
    assert say(connection, b"b") == b"b"
    assert time.monotonic() - begin >= 2 * DELAY_S
    assert say(connection, BIG) == BIG


def test_a_slow_link_is_late_and_not_narrow(net: Net) -> None:
    """Pieces travel one after the other, as on a long wire: a hundred are not a hundred delays late."""
    connection = net.connect()
    net.order(StageLink(stage=0, delay_s=PATIENCE_S / 100))
    begin = time.monotonic()
    for _ in range(100):
        connection.sendall(b"x")
        time.sleep(0.001)
    assert read(connection, 100) == b"x" * 100
    assert time.monotonic() - begin < PATIENCE_S


def test_a_cut_link_keeps_bytes_and_a_healed_one_brings_them(net: Net) -> None:
    connection = net.connect()
    assert say(connection, b"a") == b"a"
    net.order(StageLink(stage=0, is_cut=True))
    connection.sendall(b"bcd")
    assert is_silent(connection)
    net.order(StageLink(stage=0))
    assert read(connection, 3) == b"bcd"


def test_a_cut_link_hides_the_end_of_a_connection(net: Net) -> None:
    """A partition tells no side that the other one is gone."""
    connection = net.connect()
    assert say(connection, b"a") == b"a"
    net.order(StageLink(stage=0, is_cut=True))
    connection.shutdown(socket.SHUT_WR)
    assert is_silent(connection)
    net.order(StageLink(stage=0))
    assert read(connection, 1) == b""


def test_a_new_connection_through_a_cut_link_leads_nowhere_until_it_is_healed(net: Net) -> None:
    net.order(StageLink(stage=0, is_cut=True))
    connection = net.connect()
    connection.sendall(b"a")
    assert is_silent(connection)
    net.order(StageLink(stage=0))
    assert read(connection, 1) == b"a"


def test_a_route_of_two_stages_is_cut_by_either(net: Net) -> None:
    connection, other = net.connect(1), net.connect(0)
    net.order(StageLink(stage=1, is_cut=True))
    connection.sendall(b"a")
    assert is_silent(connection)
    assert say(other, b"b") == b"b"


def test_a_dropped_link_resets_its_connections_and_no_other(net: Net) -> None:
    connection, other = net.connect(2), net.connect(0)
    assert say(connection, b"a") == b"a"
    net.order(StageLink(stage=2, is_dropped=True))
    assert is_gone(connection)
    # The reset of a new connection may come before ``connect`` has returned, or after it.
    with contextlib.suppress(ConnectionResetError):
        assert is_gone(net.connect(2))
    assert say(other, b"b") == b"b"


def test_what_is_no_order_is_refused(net: Net) -> None:
    with pytest.raises(EngineError, match=r"refused the order .*KeyError: 7"):
        net.order(StageLink(stage=7, is_cut=True))
    with pytest.raises(EngineError, match="did not answer the order"):
        order_link(net.orders.with_name("nowhere"), StageLink(stage=0, is_cut=True))


def test_the_end_of_the_relay_says_nothing_of_open_connections(
    echo: Echo, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Running tasks are cancelled without an error report from asyncio."""
    relay = Relay([Route(echo.port, (0,))], tmp_path / "orders")
    with socket.create_connection((LOOPBACK, relay.ports[0]), PATIENCE_S) as connection:
        connection.sendall(b"here")
        assert connection.recv(4) == b"here"
        relay.close()
    assert not caplog.records
