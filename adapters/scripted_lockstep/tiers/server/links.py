"""The relay of placed stages: TCP connections whose bytes can be delayed, held and dropped, in a thread.

It owns connections and their bytes, which it never interprets, and knows stages by number only. The scheduler's process
sets the state of a link, with one connection to the relay's Unix socket per order.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from engine.core.errors import EngineError
from scripted_lockstep.script.world import StageLink
from scripted_lockstep.tiers.server.loop_thread import LoopThread

LOOPBACK: Final = "127.0.0.1"
READ_BYTES: Final = 1 << 16
# Bounds the pieces in flight in one direction: a slow link delays bytes, but does not limit their rate.
MOST_UNDERWAY_PIECES: Final = 1024
MAX_ORDER_BYTES: Final = 1 << 12
# The time to start listening, and to carry out an order; a relay that takes longer hangs.
ORDER_TIMEOUT_S: Final = 30.0
_NO_LINGER: Final = struct.pack("ii", 1, 0)

# Each piece with its time of arrival; an empty piece ends the direction.
_Underway = asyncio.Queue[tuple[float, bytes]]
_Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Route(NamedTuple):
    """The port to which connections lead, and the stages whose links they pass."""

    port: int
    stages: tuple[int, ...]


@dataclass
class _Through:
    """The state of one stage's link, and the connections through it."""

    link: StageLink
    pairs: set[_Pair] = field(default_factory=set)


class Relay(LoopThread):
    """All links of one engine. ``ports`` are the ports of its routes, in order; it takes orders at ``orders_path``."""

    def __init__(self, routes: Sequence[Route], orders_path: Path) -> None:
        super().__init__("scripted-links")
        self._links = {stage: _Through(StageLink(stage=stage)) for route in routes for stage in route.stages}
        self._servers: list[asyncio.Server] = []
        self._orders_path = orders_path
        # Replaced at each order, so that every waiter checks again.
        self._changed = asyncio.Event()
        self.ports = self._spawn(self._open(routes)).result(ORDER_TIMEOUT_S)

    async def wait_for_change(self) -> None:
        await self._changed.wait()

    # -- in the thread --

    async def _open(self, routes: Sequence[Route]) -> tuple[int, ...]:
        servers = [await asyncio.start_server(self._relay_to(route), LOOPBACK, 0) for route in routes]
        self._servers = [*servers, await asyncio.start_unix_server(self._take_order, self._orders_path)]
        return tuple(server.sockets[0].getsockname()[1] for server in servers)

    async def _end(self) -> None:
        for server in self._servers:
            server.close()
        await super()._end()
        self._orders_path.unlink(missing_ok=True)

    def _relay_to(self, route: Route) -> _Accept:
        links = [self._links[stage] for stage in route.stages]

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            # At the end of the relay. Until Python 3.12 streams report a cancelled handler with a traceback.
            with contextlib.suppress(asyncio.CancelledError):
                await _Pair(self, links, reader, writer).run(route.port)

        return accept

    async def _take_order(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry out an order, from the next byte on; answer with the reason if that fails."""
        try:
            link = msgspec.msgpack.decode(await reader.read(MAX_ORDER_BYTES), type=StageLink)
            through = self._links[link.stage]
        except (KeyError, ValueError) as exc:
            writer.write(f"{type(exc).__name__}: {exc}".encode())
        else:
            through.link = link
            for pair in tuple(through.pairs) if link.is_dropped else ():
                pair.reset()
            self._changed.set()
            self._changed = asyncio.Event()
        writer.close()


class _Pair:
    """An incoming connection, the outgoing one made for it, and the bytes between them."""

    def __init__(
        self, relay: Relay, through: Sequence[_Through], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._relay = relay
        self._through = through
        self._reader = reader
        self._writers = [writer]

    async def run(self, port: int) -> None:
        """Connect and carry bytes both ways until both sides have ended, or one was reset."""
        for through in self._through:
            through.pairs.add(self)
        try:
            await self._passable()
            reader, writer = await asyncio.open_connection(LOOPBACK, port)
            self._writers.append(writer)
            async with asyncio.TaskGroup() as group:
                for source, target in ((self._reader, writer), (reader, self._writers[0])):
                    underway = _Underway(MOST_UNDERWAY_PIECES)
                    group.create_task(self._take(source, underway))
                    group.create_task(self._forward(underway, target))
        except* OSError:
            # Passed on as a reset: an orderly close in the middle of the bytes would hide it.
            self.reset()
        finally:
            for through in self._through:
                through.pairs.discard(self)
            for writer in self._writers:
                writer.close()

    def reset(self) -> None:
        """Reset both connections at once, as the death of a machine does."""
        for writer in self._writers:
            with contextlib.suppress(OSError):  # it is closed already
                # A socket that does not linger resets its peer.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()

    async def _take(self, reader: asyncio.StreamReader, underway: _Underway) -> None:
        """Note the arrival of each piece of one direction."""
        while data := await reader.read(READ_BYTES):
            await underway.put((time.monotonic(), data))
        await underway.put((time.monotonic(), b""))

    async def _forward(self, underway: _Underway, writer: asyncio.StreamWriter) -> None:
        """Send each piece of one direction when it is due."""
        while True:
            came_at, data = await underway.get()
            await self._passable()
            # Checked again after each wait, because a link may be healed or cut in the meantime.
            while (left_s := came_at + self._delay_s - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._relay.wait_for_change(), left_s)
                await self._passable()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    @property
    def _delay_s(self) -> float:
        return sum(through.link.delay_s for through in self._through)

    async def _passable(self) -> None:
        """Wait while a link is cut. Raises ConnectionResetError when one was dropped."""
        while any(through.link.is_cut for through in self._through):
            await self._relay.wait_for_change()
        if any(through.link.is_dropped for through in self._through):
            raise ConnectionResetError("the link of a stage was dropped")


def order_link(orders_path: Path, link: StageLink) -> None:
    """Set the state of a link at the relay with this path. Raises EngineError if the relay fails."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(ORDER_TIMEOUT_S)
            connection.connect(str(orders_path))
            connection.sendall(msgspec.msgpack.encode(link))
            connection.shutdown(socket.SHUT_WR)
            answer = connection.recv(MAX_ORDER_BYTES)
    except OSError as exc:
        raise EngineError(f"the relay of the stages' links did not answer the order {link}: {exc}") from exc
    if answer:
        raise EngineError(f"the relay of the stages' links refused the order {link}: {answer.decode()}")
