"""A connection's bounds, on real sockets with short times: silence, half a header, half a body, an answer not taken."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections import Counter
from typing import Any

import h11
import httpx
import openai
import pytest
from served_connections import HEAD, PATIENCE_S, App, serve
from uvicorn.server import ServerState

from engine.core.errors import StartupError
from engine.frontend.http.connection import (
    FREE_CHUNKS,
    MIN_CHUNK_BYTES,
    READ_BYTES,
    RESERVED_FILES,
    Connection,
    ConnectionBounds,
    quiet_resource_errors,
)
from engine.frontend.http.process import ACCEPTS_A_TURN, KEEP_ALIVE_S, EventServer, uvicorn_config
from engine.frontend.http.routes.generation import PART_WRITER
from engine.process.links.listener import bind_server
from engine.process.logs import OncePerMinute
from engine.process.settings import ServerSettings

SHORT_S = 0.15
# More than what sockets and transports hold between a server and a client that reads nothing.
MUCH = 64 * 2**20


def test_an_idle_connection_is_kept_longer_than_clients_keep_theirs(play) -> None:
    """A05: one that the server closes first may be closed as the next request is on its way, and that is lost.

    Clients of today keep idle connections for 5 s (httpx, the OpenAI client) and 15 s (aiohttp); some for 60.
    """

    async def scene(stage) -> None:
        config = uvicorn_config(stage.app, stage.settings)
        config.load()
        connection = config.http_protocol_class(config, ServerState(), {})
        assert isinstance(connection, Connection)
        assert connection.timeout_keep_alive == KEEP_ALIVE_S
        patience_s = [httpx.Limits().keepalive_expiry, openai.DEFAULT_CONNECTION_LIMITS.keepalive_expiry, 15, 60]
        assert max(expiry for expiry in patience_s if expiry is not None) < connection.timeout_keep_alive

    play(scene)


async def ask(port: int, *parts: bytes, every_s: float = 0.0) -> bytes:
    """Everything that is answered until the server closes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for part in parts:
            writer.write(part)
            await asyncio.sleep(every_s)
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


async def drip(port: int, head: bytes, part: bytes) -> bytes:
    """A part again and again until the server closes: everything that it answered."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    reading = asyncio.create_task(reader.read())
    try:
        writer.write(head)
        while not reading.done():
            writer.write(part)
            await asyncio.sleep(0.01)
        return reading.result()
    except ConnectionError:  # A client that still writes may find the connection reset before it reads.
        return b""
    finally:
        writer.close()


class Streaming(App):
    """Answers with a body of no known length, written without and with a coroutine in turns."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        writer = scope["extensions"][PART_WRITER]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for part in (b"first ", b"second "):
            writer.write_part(part * 3)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        assert writer.has_room
        await send({"type": "http.response.body", "body": b"end"})


def problem(answer: bytes) -> dict[str, Any]:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
def test_parts_that_are_written_at_once_are_framed_as_the_others(version: bytes) -> None:
    """C02: by every client that knows the version, and the next request on the connection is answered too."""

    async def scene(app: App, port: int) -> None:
        last = b"POST / HTTP/%b\r\nhost: x\r\ncontent-length: 0\r\nconnection: close\r\n\r\n" % version
        first = last.replace(b"connection: close\r\n", b"") if version == b"1.1" else b""
        answer = await ask(port, first + last)
        client = h11.Connection(h11.CLIENT)
        bodies = []
        for _ in range(2 if first else 1):
            client.send(h11.Request(method="POST", target="/", headers=[("host", "x")]))
            client.send(h11.EndOfMessage())
            if not bodies:
                client.receive_data(answer)
                client.receive_data(b"")
            body = b""
            while not isinstance(event := client.next_event(), h11.EndOfMessage):
                body += bytes(event.data) if isinstance(event, h11.Data) else b""
            bodies.append(body)
            if client.our_state is h11.DONE and client.their_state is h11.DONE:
                client.start_next_cycle()
        assert set(bodies) == {b"first " * 4 + b"second " * 4 + b"end"}
        assert (b"transfer-encoding: chunked" in answer.lower()) is (version == b"1.1")

    serve(scene, app=Streaming(0, early=False))


def test_a_silent_connection_is_closed() -> None:
    async def scene(app: App, port: int) -> None:
        assert await ask(port) == b""
        assert app.seen == []

    serve(scene, header_timeout_s=SHORT_S)


@pytest.mark.parametrize("dripped", [False, True])
def test_half_a_header_is_408(dripped: bool) -> None:
    """Connections with half a header stayed open forever. That bytes keep coming is no reason to wait longer."""

    async def scene(app: App, port: int) -> None:
        begun = b"POST / HTTP/1.1\r\n"
        answer = await (drip(port, begun, b"a: b\r\n") if dripped else ask(port, begun))
        if not dripped:
            assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
            assert (
                problem(answer)["message"]
                == "the header of a request must arrive within 0.15 s, but did not; try again"
            )
        assert app.seen == []

    serve(scene, header_timeout_s=SHORT_S)


def test_the_header_of_a_second_request_has_its_deadline_too() -> None:
    async def scene(app: App, port: int) -> None:
        answer = await ask(port, HEAD + b"\r\nabcde", b"POST / HT", every_s=0.05)
        assert [line for line in answer.split(b"\r\n") if line.startswith(b"HTTP")] == [
            b"HTTP/1.1 200 OK",
            b"xxHTTP/1.1 408 Request Timeout",
        ] or b"408" in answer

    serve(scene, header_timeout_s=SHORT_S)


def test_half_a_body_is_408_and_its_request_is_told() -> None:
    async def scene(app: App, port: int) -> None:
        answer = await ask(port, HEAD + b"\r\nab")
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert "the body of a request must arrive within 0.15 s" in problem(answer)["message"]
        await asyncio.sleep(0)
        assert app.seen[0] == "http.disconnect"

    serve(scene, body_timeout_s=SHORT_S)


def test_a_body_that_is_dripped_after_its_answer_ends_at_the_same_deadline() -> None:
    """A refusal does not wait for the body: without a deadline the rest of it could come forever."""

    async def scene(app: App, port: int) -> None:
        answer = await drip(port, b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9999\r\n\r\n", b"a")
        assert answer.count(b"HTTP/1.1") <= 1
        assert b"408" not in answer

    serve(scene, body_timeout_s=SHORT_S, early=True)


def test_who_waits_for_an_answer_is_waited_for() -> None:
    """The bounds are on what clients send: an answer may take as long as it takes."""

    async def scene(app: App, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(2):
            writer.write(HEAD + b"\r\nab")
            await asyncio.sleep(0)
            writer.write(b"cde")
            assert await reader.readuntil(b"xx")
            # Kept alive between two requests, for uvicorn's time and not for a header's.
            await asyncio.sleep(2 * SHORT_S)
        writer.close()

    serve(scene, header_timeout_s=SHORT_S, body_timeout_s=SHORT_S)


def test_a_client_that_takes_nothing_is_cut() -> None:
    async def scene(app: App, port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(HEAD + b"\r\nabcde")
        while "end" not in app.seen:
            await asyncio.sleep(0.01)
        writer.transport.abort()

    serve(scene, answer_bytes=MUCH, send_timeout_s=SHORT_S)


def test_one_connection_too_many_is_told_and_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    async def scene(app: App, port: int) -> None:
        held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
        for _ in range(3):
            answer = await ask(port)
            assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
            assert b"retry-after: 1\r\n" in answer
            assert "3 connections, its maximum" in problem(answer)["message"]
        held.pop()[1].close()
        while b"200 OK" not in await ask(port, HEAD + b"connection: close\r\n\r\nabcde"):
            pass  # The server has not seen yet that one has left.
        for _, writer in held:
            writer.close()

    with caplog.filtering(OncePerMinute()):
        serve(scene, max_connections=3)
    assert len([record for record in caplog.records if "max_connections=3" in record.getMessage()]) == 1


def test_what_is_no_http_gets_the_usual_shape() -> None:
    async def scene(app: App, port: int) -> None:
        answer = await ask(port, b"\x16\x03\x01 nonsense\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert problem(answer)["type"] == "invalid_request_error"

    serve(scene)


def test_connections_leave_file_descriptors_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def limit(files: int) -> int:
        monkeypatch.setattr(resource, "getrlimit", lambda _: (files, files))
        return ConnectionBounds(ServerSettings()).most

    assert limit(4096) - limit(1024) == 4096 - 1024
    assert limit(1024) < 1024 - RESERVED_FILES
    assert ConnectionBounds(ServerSettings(max_connections=7)).most == 7
    assert ConnectionBounds(ServerSettings(max_connections=9999)).most < 1024
    with pytest.raises(StartupError, match="raise it with 'ulimit -n'"):
        limit(RESERVED_FILES)


def test_that_no_file_is_left_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """asyncio says it with a traceback for each try: 227,000 in 25 s."""
    handle = quiet_resource_errors()
    loop = asyncio.new_event_loop()
    try:
        for _ in range(100):
            handle(
                loop, {"message": "out of system resource", "exception": OSError(24, "Too many"), "socket": object()}
            )
        handle(loop, {"message": "a bug", "exception": ValueError("x")})
    finally:
        loop.close()
    assert [record.getMessage() for record in caplog.records] == [
        "cannot accept a connection: [Errno 24] Too many",
        "a bug",
    ]


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"


@pytest.mark.parametrize(
    ("sent", "rule"),
    [
        (CHUNKED + b"\r\n" + b"1\r\nx\r\n" * 40_000, "chunks of a body must have 256 bytes on average"),
        (CHUNKED + b"\r\n" + b"1\r\nx\r\n" * 600 + b"400\r\n" + b"x" * 1024 + b"\r\n", "chunks of a body must"),
        (b"POST / HTTP/1.1\r\n" + b"a:\r\n" * 60_000 + b"\r\n", "a header must have at most 128 lines"),
        (b"POST / HTTP/1.1\r\n" + b"a:\r\n" * 129 + b"\r\n", "a header must have at most 128 lines"),
        (CHUNKED + b"\r\n0\r\n" + b"a:\r\n" * 60_000 + b"\r\n", "a header must have at most 128 lines"),
        (
            HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\n\r\n",
            "must have Content-Length or Transfer-Encoding, but has both",
        ),
        (HEAD.replace(b"\r\n", b"\n") + b"\nabcde", "must end with CR LF, but one ends with only LF"),
        (HEAD.replace(b"length: 5", b"length: -5") + b"\r\n", "must be HTTP/1.1, but it is not: bad Content-Length"),
        (HEAD + b"host: y\r\n\r\nabcde", "must be HTTP/1.1, but it is not: Found multiple Host: headers"),
        (b"GET /health\r\n\r\n", "must be HTTP/1.1, but it is not: illegal request line: 'GET /health'"),
        (HEAD + b'don\'t "a": b\r\n\r\nabcde', """it is not: illegal header line: 'don\\'t "a": b'"""),
        (HEAD + b"don't: b\r\n a b: c\r\n\r\nabcde", "must begin with a name, but one begins with whitespace"),
        (HEAD + b"don't a: b\r\n\r\nabcde", """it is not: illegal header line: "don't a: b\""""),
        (CHUNKED + b"\r\n3\r\nabcd\r\n", r"it is not: malformed chunk footer: 'd\r' (expected '\r\n')"),
        (HEAD + b"a: b\r\n c\r\n\r\nabcde", "must begin with a name, but one begins with whitespace"),
        (HEAD + b"a: b\r\n\tc\r\n\r\nabcde", "must begin with a name, but one begins with whitespace"),
        (HEAD.replace(b"HTTP/1.1", b"HTTP/3.0") + b"\r\nabcde", "HTTP/1.1 or HTTP/1.0, got HTTP/3.0"),
        (HEAD.replace(b"HTTP/1.1", b"HTTP/0.9") + b"\r\nabcde", "HTTP/1.1 or HTTP/1.0, got HTTP/0.9"),
        (HEAD + b"Content-Length: 5\r\n\r\nabcde", "must have one Content-Length"),
        (HEAD + b"CONTENT-LENGTH : 5\r\n\r\nabcde", "must have one Content-Length"),
        (HEAD.replace(b"length: 5", b"length: 5, 5") + b"\r\nabcde", "must have one Content-Length"),
        (CHUNKED.replace(b"HTTP/1.1", b"HTTP/1.0") + b"\r\n0\r\n\r\n", "HTTP/1.0 must have no Transfer-Encoding"),
        (HEAD.replace(b" / ", b" http://x@y/503 ") + b"\r\nabcde", "must name its host alone"),
        (HEAD + b"content-type: a/b\r\nContent-Type: c/d\r\n\r\nabcde", "must have one content-type, but has 2"),
        (HEAD + b"authorization: a\r\nauthorization: b\r\n\r\nabcde", "must have one authorization, but has 2"),
        (HEAD + b"a: b\nc: d\r\n\r\nabcde", "must end with CR LF, but one ends with only LF"),
    ],
)
def test_what_costs_much_or_is_understood_in_two_ways_is_refused(sent: bytes, rule: str) -> None:
    """A05: without a key. 240 KB of chunks of one byte took 100 ms of the event loop in one turn, headers 200."""

    async def scene(app: App, port: int) -> None:
        seen: list[int] = []
        looks = Connection.handle_events

        def look(self: Connection) -> None:
            looks(self)
            seen.append(self._parser._chunks)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Connection, "handle_events", look)
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            # The client still writes when it is refused, so that the connection may be reset before it reads.
            answer = await reader.read(2048)
            writer.transport.abort()
        assert answer.startswith(b"HTTP/1.1 400 Bad Request\r\n")
        assert b"connection: close" in answer
        assert rule in problem(answer)["message"]
        assert max(seen) <= FREE_CHUNKS + READ_BYTES // MIN_CHUNK_BYTES

    serve(scene)


def test_what_clients_send_in_parts_is_taken() -> None:
    async def scene(app: App, port: int) -> None:
        small, large = b"1\r\nx\r\n" * FREE_CHUNKS, b"100\r\n" + b"x" * 256 + b"\r\n"
        sent = CHUNKED + b"connection: close\r\n\r\n" + small + large * 2000 + b"0\r\na: b\r\n\r\n"
        assert b"200 OK" in await ask(port, sent)
        halves = HEAD + b"a: b\r\n" * 100 + b"connection: close\r\n\r", b"\n" + b"\n" * 5
        assert b"200 OK" in await ask(port, *halves, every_s=0.02)

    serve(scene)


def test_a_refused_client_keeps_no_connection() -> None:
    """A05: 400 connections that each got a 401 held all others out for 78 s at `ulimit -n 256`."""

    async def refused(port: int, status: int) -> None:
        head = HEAD.replace(b" / ", b" /%d " % status)
        answer = await ask(port, head + b"\r\nab", b"cde", every_s=0.05)
        assert answer.startswith(b"HTTP/1.1 %d " % status)
        assert b"connection: close" in answer
        assert answer.endswith(b"xx"), "the body was read before the end, which would reset the connection otherwise"
        assert b"HTTP/1.1 %d " % status in await ask(port, head + b"\r\nab")

    async def scene(app: App, port: int) -> None:
        await asyncio.gather(*(refused(port, status) for status in (401, 403, 429, 503)))

    # A wait for a body that does not come would outlast this test.
    serve(scene, early=True, body_timeout_s=100 * PATIENCE_S)


def test_idle_connections_give_way_to_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A05: the one that is idle for longest, and none that has a request or has only just come."""
    monkeypatch.setattr("engine.frontend.http.connection.IDLE_S", PATIENCE_S)

    async def scene(app: App, port: int) -> None:
        busy = await asyncio.open_connection("127.0.0.1", port)
        busy[1].write(HEAD + b"\r\nab")
        first, second = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
        for reader, writer in (first, second):
            writer.write(HEAD + b"\r\nabcde")
            assert await reader.readuntil(b"xx")
        assert b"503" in await ask(port)
        monkeypatch.setattr("engine.frontend.http.connection.IDLE_S", 0.0)
        assert b"200 OK" in await ask(port, HEAD + b"connection: close\r\n\r\nabcde")
        assert await first[0].read() == b""
        second[1].write(HEAD + b"\r\nabcde")
        assert await second[0].readuntil(b"xx")
        busy[1].write(b"cde")
        assert await busy[0].readuntil(b"xx")
        for _, writer in (busy, first, second):
            writer.close()

    serve(scene, max_connections=3)


@pytest.mark.parametrize(
    ("target", "path", "query"),
    [
        (b"http://h.example:80/503?a=b", "/503", b"a=b"),
        (b"HTTPS://h.example", "/", b""),
        (b"http://h.example?a", "/", b"a"),
    ],
)
def test_an_absolute_target_is_its_path_and_its_host(target: bytes, path: str, query: bytes) -> None:
    """C02: proxies send it, and a server must accept it; its host takes precedence over the Host header."""
    scopes: list[Any] = []

    class Noting(App):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            scopes.append(scope)
            await super().__call__(scope, receive, send)

    async def scene(_: App, port: int) -> None:
        await ask(port, HEAD.replace(b" / ", b" %b " % target) + b"connection: close\r\n\r\nabcde")
        (scope,) = scopes
        assert (scope["path"], scope["query_string"]) == (path, query)
        assert [value for name, value in scope["headers"] if name == b"host"] == [
            target.partition(b"://")[2].partition(b"/")[0].partition(b"?")[0]
        ]

    serve(scene, app=Noting(2, early=False))


def test_connections_are_accepted_in_portions() -> None:
    """A05: asyncio accepts in one turn as many as it queues: 2,048 of them held every stream up for 71 to 299 ms."""
    made: list[int] = []
    turn = 0

    class Counted(Connection):
        def connection_made(self, transport: Any) -> None:
            made.append(turn)
            super().connection_made(transport)

    async def scene() -> None:
        nonlocal turn
        config = uvicorn_config(App(2, early=False), ServerSettings())
        config.http_protocol_class = Counted
        config.http = Counted.under(ConnectionBounds(ServerSettings()))
        listener = bind_server("127.0.0.1", 0)
        server = EventServer(config, lambda: None)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0)
        clients = [socket.socket() for _ in range(200)]
        for client in clients:
            # The system completes each of them while the loop stands still, if its queue has room.
            client.settimeout(PATIENCE_S)
            client.connect(listener.getsockname())
        while len(made) < len(clients):
            turn += 1
            await asyncio.sleep(0)
        for client in clients:
            client.close()
        server.stop()
        await serving
        listener.close()
        assert max(Counter(made).values()) <= ACCEPTS_A_TURN

    asyncio.run(asyncio.wait_for(scene(), 4 * PATIENCE_S))


def test_each_request_of_a_connection_has_bounds_of_its_own() -> None:
    """What one may send does not shrink with what came before it: chunks that have room once have it each time."""

    async def scene(app: App, port: int) -> None:
        head = b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n"
        chunks = b"1\r\nx\r\n" * FREE_CHUNKS + b"0\r\n\r\n"
        last = head + b"connection: close\r\n\r\n" + chunks
        answer = await ask(port, (head + b"\r\n" + chunks) * 3 + last)
        assert answer.count(b"200 OK") == 4
        assert app.seen.count("http.request") == 4

    serve(scene)
