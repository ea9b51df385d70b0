"""The links of placed stages: a relay of TCP connections whose bytes can be delayed, held back and dropped.

Owns connections and their bytes, which it never reads; knows stages by number and nothing else of an engine. Runs in
the process of its own that ``relay`` starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from scripted.adapters.lockstep.script.link_orders import CutLink, HealLink, LinkOrder, SlowLink

LOOPBACK: Final = "127.0.0.1"
READ_BYTES: Final = 1 << 16
# What may be on its way through one direction of a connection: a slow link is late, not narrow.
MAX_UNDERWAY_BYTES: Final = 1 << 23
_NO_LINGER: Final = struct.pack("ii", 1, 0)


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """A port to listen on, 0 for any, where its connections lead, and the stages whose link they go through."""

    host: str
    port: int
    stages: tuple[int, ...]
    listen_port: int = 0


_Accept = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@dataclass
class _Link:
    """The state of one stage's link, and the connections through it."""

    delay_s: float = 0.0
    is_cut: bool = False
    is_dropped: bool = False
    pairs: set[_Pair] = field(default_factory=set)


class Links:
    """All links of one engine. Used from one event loop."""

    def __init__(self, routes: Sequence[Route]) -> None:
        self._routes = routes
        self._links = {stage: _Link() for route in routes for stage in route.stages}
        self._servers: list[asyncio.Server] = []
        # Replaced at each order, so that whatever waits looks again.
        self._changed = asyncio.Event()

    async def open(self) -> tuple[int, ...]:
        """Listen on loopback; the ports of the routes, in order."""
        for route in self._routes:
            self._servers.append(await asyncio.start_server(self._relay_to(route), LOOPBACK, route.listen_port))
        return tuple(server.sockets[0].getsockname()[1] for server in self._servers)

    def obey(self, order: LinkOrder) -> None:
        """Carry an order out; it holds from the next byte on. Raises KeyError for a stage without a link."""
        link = self._links[order.stage]
        if isinstance(order, SlowLink):
            link.delay_s = order.delay_s
        elif isinstance(order, CutLink):
            link.is_cut = True
        elif isinstance(order, HealLink):
            link.delay_s, link.is_cut = 0.0, False
        else:
            link.is_dropped = True
            for pair in tuple(link.pairs):
                pair.reset()
        self._changed.set()
        self._changed = asyncio.Event()

    async def wait_for_change(self) -> None:
        await self._changed.wait()

    def _relay_to(self, route: Route) -> _Accept:
        links = [self._links[stage] for stage in route.stages]

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await _Pair(self, links, reader, writer).run(route)

        return accept


class _Pair:
    """One connection that came, the one that was made for it, and the bytes between them."""

    def __init__(
        self, links: Links, through: Sequence[_Link], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self._links = links
        self._through = through
        self._reader = reader
        self._writers = [writer]

    async def run(self, route: Route) -> None:
        """Connect and carry bytes both ways until both sides have ended, or one was reset."""
        for link in self._through:
            link.pairs.add(self)
        try:
            await self._passable()
            reader, writer = await asyncio.open_connection(route.host, route.port)
            self._writers.append(writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._carry(self._reader, writer))
                group.create_task(self._carry(reader, self._writers[0]))
        except* OSError:
            # What one side has lost the other loses too: an end in the middle of the bytes is no end in order.
            self.reset()
        finally:
            for link in self._through:
                link.pairs.discard(self)
            for writer in self._writers:
                writer.close()

    def reset(self) -> None:
        """End both connections at once, as the death of a machine does."""
        for writer in self._writers:
            with contextlib.suppress(OSError):  # it is closed already
                # Without a lingering end the peer sees a reset, whatever it has read.
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one direction: a reader that notes when each piece is due, and a sender that keeps to it."""
        underway = _Underway()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._take(reader, underway))
            group.create_task(self._hand_on(underway, writer))

    async def _take(self, reader: asyncio.StreamReader, underway: _Underway) -> None:
        while data := await reader.read(READ_BYTES):
            await underway.put(data)
        await underway.put(b"")

    async def _hand_on(self, underway: _Underway, writer: asyncio.StreamWriter) -> None:
        while True:
            came_at, data = await underway.get()
            await self._passable()
            # Asked again after each wait, because a link may be healed or cut in the meantime.
            while (left_s := came_at + self._delay_s - time.monotonic()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._links.wait_for_change(), left_s)
                await self._passable()
            if not data:
                writer.write_eof()
                return
            writer.write(data)
            await writer.drain()

    @property
    def _delay_s(self) -> float:
        return sum(link.delay_s for link in self._through)

    async def _passable(self) -> None:
        """Wait while a link is cut. Raises ConnectionResetError when one was dropped."""
        while any(link.is_cut and not link.is_dropped for link in self._through):
            await self._links.wait_for_change()
        if any(link.is_dropped for link in self._through):
            raise ConnectionResetError("the link of a stage was dropped")


class _Underway:
    """Bytes of one direction that were read and not yet handed on, each piece with the time at which it came."""

    def __init__(self) -> None:
        self._pieces: deque[tuple[float, bytes]] = deque()
        self._bytes = 0
        self._moved = asyncio.Condition()

    async def put(self, data: bytes) -> None:
        """Add a piece, the empty one for the end; waits for room."""
        async with self._moved:
            await self._moved.wait_for(lambda: self._bytes < MAX_UNDERWAY_BYTES)
            self._pieces.append((time.monotonic(), data))
            self._bytes += len(data)
            self._moved.notify_all()

    async def get(self) -> tuple[float, bytes]:
        async with self._moved:
            await self._moved.wait_for(lambda: bool(self._pieces))
            came_at, data = self._pieces.popleft()
            self._bytes -= len(data)
            self._moved.notify_all()
            return came_at, data
