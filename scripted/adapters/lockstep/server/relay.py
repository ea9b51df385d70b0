"""The relay of placed stages from outside: started and ended by the test process, ordered by the scheduler's.

Owns the process and the form of its orders. What an order does to bytes is in ``links``.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from engine.errors import EngineError, StartupError
from engine.frames import decoder_of
from scripted.adapters.lockstep.script.link_orders import LinkOrder
from scripted.adapters.lockstep.server.links import Route

RELAY_MODULE: Final = "scripted.adapters.lockstep.server.relay_process"
MAX_ORDER_BYTES: Final = 1 << 12
# An order is carried out between two bytes; more than this is a relay that hangs.
ORDER_TIMEOUT_S: Final = 5.0
END_TIMEOUT_S: Final = 5.0

_order_of: Callable[[bytes], LinkOrder] = decoder_of(LinkOrder)


class RelayPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What the relay is told when it starts: its routes, and where it listens for orders."""

    routes: tuple[Route, ...]
    orders_path: str


class Ports(msgspec.Struct, frozen=True, kw_only=True):
    """The relay's answer: the port of each route, in order. It listens on all of them."""

    ports: tuple[int, ...]


def decode_order(data: bytes) -> LinkOrder:
    """Decode an order. Raises BadFrameError for anything else."""
    return _order_of(data)


class Relay:
    """A running relay. ``ports`` are those of its routes. It ends with this process at the latest."""

    def __init__(self, routes: Sequence[Route], orders_path: Path) -> None:
        self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", RELAY_MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            # A terminal's Ctrl-C is for the test process, which ends the relay in order.
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        plan = RelayPlan(routes=tuple(routes), orders_path=str(orders_path))
        self._process.stdin.write(msgspec.json.encode(plan) + b"\n")
        self._process.stdin.flush()
        said = self._process.stdout.readline()
        if not said:
            self.close()
            raise StartupError("the relay of the stages' links ended before it listened; its error is above")
        self.ports = msgspec.json.decode(said, type=Ports).ports

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> None:
        """End it, and every connection through it; idempotent."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def order_link(orders_path: Path, order: LinkOrder) -> None:
    """Give the relay at this path an order; it holds when this returns. Raises EngineError when it did not obey."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ORDER_TIMEOUT_S)
            connection.connect(str(orders_path))
            connection.sendall(msgspec.msgpack.encode(order))
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(MAX_ORDER_BYTES)
    except OSError as exc:
        raise EngineError(f"the relay of the stages' links must take {order}, but it does not answer: {exc}") from exc
    if answer:
        raise EngineError(f"the relay of the stages' links did not take {order}: {answer.decode()}")
