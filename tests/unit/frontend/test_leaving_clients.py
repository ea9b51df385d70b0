"""Clients that stop sending or leave: they get their reply, or nothing more is written for them."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import Any

import h11
import pytest
from served_connections import HEAD, App, serve

from engine.frontend.http.routes.generation import PART_WRITER


class Slow(App):
    """Begins and ends its answer on demand; notes a client that has left."""

    def __init__(self, *, begins: bool, version: bytes) -> None:
        super().__init__(0, early=False)
        self.begun, self.end, self.left = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._begins = begins
        self.head = b"POST / HTTP/%b\r\nhost: x\r\ncontent-length: 2\r\n\r\nab" % version

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        while (await receive())["more_body"]:
            pass
        start = {"type": "http.response.start", "status": 200, "headers": []}
        if self._begins:
            await send(start)
            await send({"type": "http.response.body", "body": b"first ", "more_body": True})
        self.begun.set()
        leaving = asyncio.ensure_future(receive())
        ending = asyncio.ensure_future(self.end.wait())
        await asyncio.wait((leaving, ending), return_when=asyncio.FIRST_COMPLETED)
        if leaving.done():
            self.left.set()
            ending.cancel()
            return
        leaving.cancel()
        if not self._begins:
            await send(start)
        scope["extensions"][PART_WRITER].write_part(b"second ")
        await send({"type": "http.response.body", "body": b"third"})


def bodies(answer: bytes) -> bytes:
    """The body of one answer, as a client reads it that knows HTTP."""
    client = h11.Connection(h11.CLIENT)
    client.send(h11.Request(method="POST", target="/", headers=[("host", "x"), ("connection", "close")]))
    client.send(h11.EndOfMessage())
    client.receive_data(answer)
    client.receive_data(b"")
    body = b""
    while not isinstance(event := client.next_event(), h11.EndOfMessage):
        body += bytes(event.data) if isinstance(event, h11.Data) else b""
    return body


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
@pytest.mark.parametrize("begins", [False, True])
def test_a_client_that_sends_no_more_gets_its_answer(begins: bool, version: bytes) -> None:
    """C02: it has shut its sending side, as nc does at the end of its input."""
    app = Slow(begins=begins, version=version)

    async def scene(_: App, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(app.head)
        await app.begun.wait()
        writer.write_eof()
        await asyncio.sleep(0.05)
        assert not app.left.is_set()
        app.end.set()
        answer = await reader.read()
        assert bodies(answer) == (b"first " if begins else b"") + b"second third"
        writer.close()

    serve(scene, app=app)


@pytest.mark.parametrize("begins", [False, True])
def test_a_client_that_leaves_is_noticed_before_anything_is_written_for_it(begins: bool) -> None:
    """A05: its end looks like that of one that sends no more."""
    app = Slow(begins=begins, version=b"1.1")

    async def scene(_: App, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(app.head)
        await app.begun.wait()
        if begins:
            await reader.readuntil(b"first ")
        writer.close()
        await app.left.wait()

    serve(scene, app=app)


class Deserted(App):
    """Its client resets the connection between two parts of the reply, all in one turn of the event loop."""

    def __init__(self) -> None:
        super().__init__(answer_bytes=2, early=False)
        self.client = socket.socket()
        self.left = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.client.close()
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        assert (await receive())["type"] == "http.disconnect"
        self.left.set()


def test_a_reply_to_a_lost_connection_writes_no_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    """A05: asyncio logs each write after the fourth, until uvicorn learns that the connection is lost."""
    app = Deserted()

    async def scene(_: App, port: int) -> None:
        app.client.connect(("127.0.0.1", port))
        app.client.sendall(HEAD + b"\r\nabcde")
        await app.left.wait()

    serve(scene, app=app)
    assert not caplog.records


class Listening(App):
    """Listens for the end of its client while it works, as the routes do."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        gone = asyncio.create_task(self._gone(receive))
        await asyncio.sleep(0.01)
        await super().__call__(scope, lambda: asyncio.sleep(0, {"type": "http.request", "more_body": False}), send)
        await gone

    async def _gone(self, receive: Any) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("kind", [App, Listening])
def test_all_requests_of_a_client_that_sends_no_more_are_answered(kind: type[App], count: int) -> None:
    """C02: from the second of three on, its end was met again, and the connection was lost by an error."""

    async def scene(app: App, port: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write((HEAD + b"\r\nabcde") * count)
        writer.write_eof()
        answer = await reader.read()
        assert answer.count(b"200 OK") == count
        assert app.seen.count("http.request") == count
        writer.close()

    serve(scene, app=kind(answer_bytes=2, early=False))
