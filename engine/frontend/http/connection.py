"""One client's connection: limits on the time and the parts of header, body and reply, and on the number of
connections.

Owns the limits and their error texts; uvicorn and h11 implement the protocol. A connection that exceeds a limit is
closed, so that other clients find room; an idle or refused connection makes room too.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import logging
import re
import resource
import select
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import h11
import msgspec
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import STATUS_PHRASES, H11Protocol

from engine.core.errors import StartupError
from engine.frontend.http.responses import RETRY_AFTER_S
from engine.frontend.http.routes.generation import PART_WRITER
from engine.frontend.schema.errors import ApiError, ErrorType
from engine.process.logs import OncePerMinute
from engine.process.settings import ServerSettings

# File descriptors reserved for sockets to the scheduler and to the processes that read long bodies, for short-lived
# files, and for a connection that is refused for lack of room.
RESERVED_FILES = 32
FEWEST_CONNECTIONS = 4
# The bytes of one read, which one turn of the event loop parses.
READ_BYTES = 16_384
# Lines of a header, and of the trailers of a chunked body. Browsers send twenty.
MAX_HEADER_LINES = 128
# A chunk costs the same at any size. A body may begin with FREE_CHUNKS chunks of any size; beyond them the average
# chunk must have at least MIN_CHUNK_BYTES.
FREE_CHUNKS = 512
MIN_CHUNK_BYTES = 256
# Replies that end a connection, so that a client without a key, or one that must retry, keeps no other client out.
CLOSING_STATUSES = frozenset({401, 403, 429, 503})
# How long the rest of a refused request's body is read, so that a reset does not lose the reply.
DRAIN_REFUSED_S = 1.0
# A new connection may replace one that has been idle for this long.
IDLE_S = 1.0

_END_OF_HEADER = b"\r\n\r\n"
# How Python writes bytes, which h11's errors quote.
_BYTES = re.compile(r"""(?:bytearray\()?\b(b(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"))\)?""")
_BARE_LF = re.compile(rb"(?<!\r)\n")
_FOLD = re.compile(rb"\n[ \t]")
# Each length that is declared, in lines of its own or in a list.
_CONTENT_LENGTH = re.compile(rb"\ncontent-length[ \t]*:[^\r\n,]*(?P<list>,?)", re.IGNORECASE)
_ABSOLUTE = re.compile(rb"https?://(?P<host>[^/?#]+)(?P<path>.*)", re.IGNORECASE)
_VERSIONS = (b"1.0", b"1.1")
# Headers that, if repeated, a proxy and a server could read differently. h11 itself refuses two hosts.
_ONCE = (b"content-type", b"content-encoding", b"authorization")

logger = logging.getLogger(__name__)


class ConnectionBounds:
    """The limits of all connections of one server, resolved to numbers."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.most = _most_connections(settings.max_connections)
        self.half_closed = _HalfClosed()
        self.buffer = memoryview(bytearray(READ_BYTES))
        # The time since which each connection is idle, the longest idle one first.
        self.idle: dict[Connection, float] = {}


class _HalfClosed:
    """Watches connections whose clients have stopped sending and may have left, to notice the reset after a write.

    asyncio stops polling such a connection, so only the second write would notice a reset.
    """

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._open: dict[int, Connection] = {}

    def add(self, connection: Connection) -> None:
        if not self._open:
            connection.loop.add_reader(self._epoll.fileno(), self._look)
        descriptor = connection.transport.get_extra_info("socket").fileno()
        # Without flags, epoll reports only errors and hang-ups.
        self._epoll.register(descriptor, 0)
        self._open[descriptor] = connection

    def discard(self, connection: Connection) -> None:
        for descriptor in [number for number, one in self._open.items() if one is connection]:
            del self._open[descriptor]
            self._epoll.unregister(descriptor)
            if not self._open:
                connection.loop.remove_reader(self._epoll.fileno())

    def _look(self) -> None:
        for descriptor, _ in self._epoll.poll(0):
            self._open[descriptor].leave()


def _as_text(quoted: re.Match[str]) -> str:
    """Write quoted bytes as a text."""
    text: bytes = ast.literal_eval(quoted[1])
    closing = "" if quoted[0].startswith("bytearray") else quoted[0][len(quoted[1]) :]
    return repr(text.decode("latin-1")) + closing


class _Parser(h11.Connection):
    """h11 with limits on the parts of a request. Refuses requests that proxies and servers read differently.

    ``broken_rule`` describes the rule that the client broke.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self.broken_rule = ""
        self._chunks = 0
        self._chunked_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """Return h11's next event. Raises RemoteProtocolError also for a broken rule."""
        if self.their_state is h11.IDLE:
            self._look_at_lines(self.trailing_data[0].partition(_END_OF_HEADER)[0])
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as exc:
            why = _BYTES.sub(_as_text, str(exc))
            self.broken_rule = f"a request must be HTTP/1.1, but it is not: {why}"
            raise
        if isinstance(event, h11.Request):
            event = self._checked(event)
            self._chunks = self._chunked_bytes = 0
        elif isinstance(event, h11.Data):
            self._count(event)
        elif event is h11.NEED_DATA and self.their_state is h11.SEND_BODY:
            # h11 buffers less than a line of a body, so these are unfinished trailers.
            self._look_at_lines(self.trailing_data[0])
        return event

    def _look_at_lines(self, lines: bytes) -> None:
        if lines.count(b"\n") > MAX_HEADER_LINES:
            self._refuse(f"a header must have at most {MAX_HEADER_LINES} lines, but has more; send fewer")
        if _BARE_LF.search(lines):
            self._refuse("a line of a header must end with CR LF, but one ends with only LF; send both")
        if _FOLD.search(lines):
            self._refuse("a line of a header must begin with a name, but one begins with whitespace; do not fold lines")
        # h11 merges equal ones.
        lists = _CONTENT_LENGTH.findall(lines)
        if len(lists) > 1 or b"," in lists:
            self._refuse("a request must have one Content-Length, but has more; send one")

    def _checked(self, request: h11.Request) -> h11.Request:
        """Return the request with its path as the target and, for an absolute target, with the host in it."""
        if request.http_version not in _VERSIONS:
            version = request.http_version.decode("ascii")
            self._refuse(f"a request must be HTTP/1.1 or HTTP/1.0, got HTTP/{version}; use HTTP/1.1")
        names = Counter(name for name, _ in request.headers)
        if {b"content-length", b"transfer-encoding"} <= names.keys():
            self._refuse("a request must have Content-Length or Transfer-Encoding, but has both; send one of them")
        if request.http_version == b"1.0" and b"transfer-encoding" in names:
            self._refuse("a request of HTTP/1.0 must have no Transfer-Encoding, but has it; send Content-Length")
        for name in _ONCE:
            if names[name] > 1:
                self._refuse(f"a request must have one {name.decode('ascii')}, but has {names[name]}; send one")
        target = _ABSOLUTE.fullmatch(request.target)
        if target is None:
            return request
        if b"@" in target["host"]:
            self._refuse("a request's target must name its host alone, but it names a user too; send an Authorization")
        path = target["path"] if target["path"].startswith(b"/") else b"/" + target["path"]
        others = [(name, value) for name, value in request.headers if name != b"host"]
        return h11.Request(
            method=request.method,
            target=path,
            headers=[(b"host", target["host"]), *others],
            http_version=request.http_version,
        )

    def _count(self, part: h11.Data) -> None:
        self._chunks += part.chunk_start
        self._chunked_bytes += len(part.data)
        if self._chunks > FREE_CHUNKS + self._chunked_bytes // MIN_CHUNK_BYTES:
            self._refuse(
                f"chunks of a body must have {MIN_CHUNK_BYTES} bytes on average after the first {FREE_CHUNKS}, but "
                f"{self._chunks} of them have {self._chunked_bytes}; send larger ones, or Content-Length"
            )

    def _refuse(self, rule: str) -> NoReturn:
        self.broken_rule = rule
        raise h11.RemoteProtocolError(rule)


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A connection with limits. Streams write their parts through it, see ``PartWriter``."""

    # uvicorn creates the connections, so each server's limits are an attribute of a subclass.
    bounds: ConnectionBounds

    @classmethod
    def under(cls, bounds: ConnectionBounds) -> type[Connection]:
        return type("BoundConnection", (cls,), {"bounds": bounds})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.conn = self._parser = _Parser()
        self._application = self.app
        self.app = self._run
        self._deadline: asyncio.TimerHandle | None = None
        self._awaited: object = None
        self._sending: asyncio.TimerHandle | None = None
        self._is_half_closed = self._is_chunked = False

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application on one request, with this connection as the writer of its reply."""
        scope["extensions"] = {PART_WRITER: self}
        cycle = self.cycle

        async def send_or_close(message: Message) -> None:
            if self.transport.is_closing():
                # uvicorn finds out in the loop's next turn; until then asyncio would log each write after the fourth.
                cycle.disconnected = True
                cycle.message_event.set()
                return
            if message["type"] == "http.response.start":
                names = {name.lower() for name, _ in message.get("headers", ())}
                self._is_chunked = self.conn.their_http_version == b"1.1" and b"content-length" not in names
                if message["status"] in CLOSING_STATUSES:
                    await self._send_last(message, receive, send)
                    return
            await send(message)

        await self._application(scope, receive, send_or_close)

    async def _send_last(self, message: Message, receive: Receive, send: Send) -> None:
        """Begin the last reply of this connection, after the rest of its request if that arrives soon."""
        if not self.cycle.waiting_for_100_continue:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_REFUSED_S):
                    while self.cycle.more_body and (await receive())["type"] == "http.request":
                        continue
        await send({**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]})

    @property
    def has_room(self) -> bool:
        return not self.flow.write_paused

    def write_part(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        # Framed as h11 does, at a third of its cost for a token's event: a body of unknown length is chunked for
        # HTTP/1.1 and unframed for HTTP/1.0.
        chunked = self.conn.their_http_version == b"1.1"
        self.transport.write(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as uvicorn has it
        """Accept a client, or refuse it if there is no room."""
        super().connection_made(transport)
        if len(self.connections) > self.bounds.most and not self._end_one_idle():
            logger.warning(
                "refused connections, because max_connections=%d are open; raise it, or the limit of open files",
                self.bounds.most,
            )
            self._refuse(ApiError.unavailable(f"the server has {self.bounds.most} connections, its maximum; try again"))
            return
        self._note_idle()
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override] # as asyncio has it
        """Find out whether a client that has stopped sending has left or waits for the reply to a complete request.

        A waiting client ignores the bytes sent here; the kernel of one that has left answers with a reset.
        """
        cycle = self.cycle
        if cycle is None or cycle.response_complete or cycle.more_body or self.transport.is_closing():
            return False
        if self._is_half_closed:  # reading resumed for the next of its requests, and met the same end
            return True
        self._is_half_closed = True
        self.bounds.half_closed.add(self)
        if cycle.response_started:
            # The first digit of the next chunk's size.
            self.transport.write(b"0" if self._is_chunked else b"")
        elif self.conn.their_http_version == b"1.1":
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return True

    def leave(self) -> None:
        """Drop the connection of a client that has left."""
        self.bounds.half_closed.discard(self)
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_half_closed:
            self.bounds.half_closed.discard(self)
        self.bounds.idle.pop(self, None)
        self._end_deadline()
        self._end_sending()
        super().connection_lost(exc)

    def get_buffer(self, sizehint: int) -> memoryview:  # noqa: ARG002 - asyncio's signature
        """Return the buffer for the next bytes. All connections share it, because it is emptied before another one
        reads.
        """
        return self.bounds.buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.data_received(bytes(self.bounds.buffer[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take bytes; ignore the bytes of a refused client."""
        self.bounds.idle.pop(self, None)
        if not self.transport.is_closing():
            super().data_received(data)

    def on_response_complete(self) -> None:
        """Note the end of a reply. uvicorn calls this before it looks for the next request."""
        super().on_response_complete()
        if self._is_half_closed and self.cycle.response_complete:
            self.transport.close()
        self._note_idle()

    def _note_idle(self) -> None:
        """Note the time at which the connection became idle, if it is."""
        is_over = self.cycle is None or self.cycle.response_complete
        if is_over and self.conn.their_state is h11.IDLE and not self.conn.trailing_data[0]:
            self.bounds.idle.setdefault(self, self.loop.time())

    def _end_one_idle(self) -> bool:
        """Close the longest idle connection if it has been idle for ``IDLE_S``. Returns whether there was one."""
        oldest = next(iter(self.bounds.idle), None)
        if oldest is None or self.loop.time() - self.bounds.idle[oldest] < IDLE_S:
            return False
        del self.bounds.idle[oldest]
        oldest.connections.discard(oldest)
        oldest.transport.close()
        return True

    def handle_events(self) -> None:
        """Act on the bytes that arrived, then start the deadline of the next part."""
        super().handle_events()
        if not self.transport.is_closing():
            self._note_idle()
            self._watch()

    def pause_writing(self) -> None:
        """Start the deadline of a client that reads nothing."""
        super().pause_writing()
        self._end_sending()
        self._sending = self.loop.call_later(self.bounds.settings.send_timeout_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._end_sending()
        super().resume_writing()

    def _unsupported_upgrade_warning(self) -> None:
        """Log nothing: this server upgrades no connection, and installing a library would not help."""

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is not HTTP, with the body of every other error."""
        self._refuse(ApiError.invalid(self._parser.broken_rule or msg))

    def _watch(self) -> None:
        """Start the deadline of the awaited part, unless it is already running."""
        awaited = self._now_awaited()
        if awaited is self._awaited:
            return
        self._end_deadline()
        self._awaited = awaited
        if awaited is None:
            return
        settings = self.bounds.settings
        part, limit_s = "header", settings.header_timeout_s
        if awaited is h11.SEND_BODY:
            part, limit_s = "body", settings.body_timeout_s
        self._deadline = self.loop.call_later(limit_s, self._time_out, part, limit_s)

    def _now_awaited(self) -> object:
        """Return SEND_BODY while a body is awaited, IDLE while a header is; None while the client waits for a reply."""
        state = self.conn.their_state
        if state is h11.SEND_BODY:
            return state
        # The first request must begin within the header's limit. Between two requests the connection is kept alive.
        begun = self.cycle is None or bool(self.conn.trailing_data[0])
        return state if state is h11.IDLE and begun else None

    def _time_out(self, part: str, limit_s: float) -> None:
        if self.transport.is_closing():
            return
        silent = self.cycle is None and not self.conn.trailing_data[0]
        if silent or (part == "body" and self.cycle.response_started):
            self.transport.close()  # There is no request, or it has its reply.
            return
        self._refuse(
            ApiError(
                ErrorType.TIMEOUT, f"the {part} of a request must arrive within {limit_s:g} s, but did not; try again"
            )
        )

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with the reason unless a reply is being sent."""
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
    """Return an exception handler for an event loop that reports a lack of file descriptors at most once a minute."""
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
    """Return the configured limit, or the number that this process's file descriptors allow if that is less."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = files - len(list(Path("/proc/self/fd").iterdir())) - RESERVED_FILES
    if room < FEWEST_CONNECTIONS:
        raise StartupError(
            f"the limit of open files must leave room for {FEWEST_CONNECTIONS} connections, but is {files}, of "
            f"which {files - room} are reserved; raise it with 'ulimit -n'"
        )
    if wanted is not None and wanted > room:
        logger.warning("max_connections=%d exceeds what the limit of open files allows; using %d", wanted, room)
    return room if wanted is None else min(wanted, room)
