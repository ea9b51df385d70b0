"""One client's connection: bounds on the time for a header, a body and an answer, and on the number of connections.

Owns the bounds and the words that go with them; the protocol itself is uvicorn's. A connection that breaks a bound is
closed, so that those who keep to them find room.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h11
import msgspec
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from engine.errors import StartupError
from engine.frontend.errors import ApiError, ErrorType
from engine.frontend.responses import RETRY_AFTER_S
from engine.frontend.routes.generation import PART_WRITER
from engine.process.logs import OncePerMinute
from engine.settings import ServerSettings

__all__ = ["Connection", "ConnectionBounds", "quiet_resource_errors"]

# File descriptors that connections leave alone: sockets to the scheduler and to the processes that read long bodies,
# files that are opened for a moment, and the connection that is refused for lack of room.
RESERVED_FILES = 32
FEWEST_CONNECTIONS = 4

logger = logging.getLogger(__name__)


class ConnectionBounds:
    """The bounds on all connections of one server, resolved to numbers."""

    def __init__(self, settings: ServerSettings) -> None:
        self.header_s = settings.header_timeout_s
        self.body_s = settings.body_timeout_s
        self.send_s = settings.send_timeout_s
        self.most = _most_connections(settings.max_connections)


class Connection(H11Protocol):
    """A connection under bounds. It offers streams to write their parts, see ``PartWriter``."""

    # A connection is made for each client, by uvicorn: the bounds are a class attribute of a subclass for each server.
    bounds: ConnectionBounds

    @classmethod
    def under(cls, bounds: ConnectionBounds) -> type[Connection]:
        """The class of one server's connections."""
        return type("BoundConnection", (cls,), {"bounds": bounds})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._application = self.app
        self.app = self._run
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._sending: asyncio.TimerHandle | None = None

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on one request. Answers of a connection follow each other, so it is what writes them."""
        scope["extensions"] = {PART_WRITER: self}
        await self._application(scope, receive, send)

    @property
    def has_room(self) -> bool:
        return not self.flow.write_paused

    def write_part(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # What h11 would make of it, at a third of the cost of a token's event: a body of no known length goes in chunks
        # to who speaks HTTP/1.1, and as it is to who does not.
        chunked = self.conn.their_http_version == b"1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Accept a client, or refuse it when there is no room."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.most:
            logger.warning(
                "refused connections: there are max_connections=%d already; raise it, or the limit of open files",
                self.bounds.most,
            )
            self._refuse(ApiError.unavailable(f"the server has {self.bounds.most} connections, its most; try again"))
            return
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_deadline()
        self._end_sending()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Take bytes; those of a refused client are ignored."""
        if not self.transport.is_closing():
            super().data_received(data)

    def handle_events(self) -> None:
        """Act on what arrived; then wait for the rest of it, for as long as its kind may take."""
        super().handle_events()
        if not self.transport.is_closing():
            self._watch()

    def pause_writing(self) -> None:
        """The client takes nothing: wait for it, for a while."""
        super().pause_writing()
        self._end_sending()
        self._sending = self.loop.call_later(self.bounds.send_s, self.transport.abort)

    def resume_writing(self) -> None:
        """The client took something."""
        self._end_sending()
        super().resume_writing()

    def send_400_response(self, msg: str) -> None:
        """Refuse what is not HTTP, in the shape of every error."""
        self._refuse(ApiError.invalid(msg))

    def _watch(self) -> None:
        """Begin the deadline of what is awaited now; the one that runs already goes on."""
        awaited = self._now_awaited()
        if awaited is self._awaited:
            return
        self._end_deadline()
        self._awaited = awaited
        if awaited is None:
            return
        if awaited is h11.SEND_BODY:
            self._deadline = self.loop.call_later(self.bounds.body_s, self._time_out, "body", self.bounds.body_s)
        else:
            self._deadline = self.loop.call_later(self.bounds.header_s, self._time_out, "header", self.bounds.header_s)

    def _now_awaited(self) -> object:
        """SEND_BODY while a body is on its way, IDLE while a header is; None while the client waits for an answer."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return state
        # Before the first request a client may take no longer than for a header. Between two it is kept alive.
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        return state if state is h11.IDLE and begun else None

    def _time_out(self, part: str, limit_s: float) -> None:
        if self.transport.is_closing():
            return
        silent = self.cycle is None and not self.conn.trailing_data[0]
        if silent or (part == "body" and self.cycle.response_started):
            self.transport.close()  # It asked for nothing, or has its answer.
            return
        self._refuse(
            ApiError(
                408,
                ErrorType.TIMEOUT,
                f"the {part} of a request must arrive within {limit_s:g} s, but did not; try again",
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Say why and close, unless an answer is under way: then close."""
        self._end_deadline()
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_plain_answer(error))
        self.transport.close()

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None


def quiet_resource_errors() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """An exception handler for an event loop: it reports a lack of file descriptors once a minute."""
    lines = OncePerMinute([logger.name])

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not isinstance(context.get("exception"), OSError) or "socket" not in context:
            loop.default_exception_handler(context)
            return
        record = logger.makeRecord(
            logger.name, logging.WARNING, __file__, 0, "cannot accept a connection: %s", (context["exception"],), None
        )
        if lines.filter(record):
            logger.handle(record)

    return handle


def _plain_answer(error: ApiError) -> bytes:
    body = msgspec.json.encode(error.body)
    busy = f"retry-after: {RETRY_AFTER_S}\r\n" if error.status == 503 else ""
    head = (
        f"HTTP/1.1 {error.status} {STATUS_PHRASES[error.status].decode()}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{busy}connection: close\r\n\r\n"
    )
    return head.encode() + body


def _most_connections(wanted: int | None) -> int:
    """The configured limit, or what this process's file descriptors allow; never more than that."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = files - _open_files() - RESERVED_FILES
    if room < FEWEST_CONNECTIONS:
        raise StartupError(
            f"the limit of open files must leave room for {FEWEST_CONNECTIONS} connections, but is {files}, of which "
            f"{files - room} are needed otherwise; raise it with 'ulimit -n'"
        )
    if wanted is not None and wanted > room:
        logger.warning("max_connections=%d is more than the open files allow; it is %d", wanted, room)
    return room if wanted is None else min(wanted, room)


def _open_files() -> int:
    folder = Path("/proc/self/fd") if Path("/proc/self/fd").is_dir() else Path("/dev/fd")
    return len(os.listdir(folder))  # noqa: PTH208 - names alone, for their number
