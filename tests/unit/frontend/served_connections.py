"""An ASGI application behind this server's connections, on a real socket of loopback."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from engine.frontend.http.connection import Connection, ConnectionBounds
from engine.process.settings import ServerSettings

PATIENCE_S = 30.0
HEAD = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n"


class App:
    """Reads the body, notes what came of it, answers."""

    def __init__(self, answer_bytes: int, early: bool) -> None:
        self.seen: list[str] = []
        self.answer = b"x" * answer_bytes
        self.early = early

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if not self.early:
            while (message := await receive())["type"] == "http.request" and message["more_body"]:
                pass
            self.seen.append(message["type"])
        length = str(len(self.answer)).encode()
        status = int(scope["path"].removeprefix("/") or 200)
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-length", length)]})
        await send({"type": "http.response.body", "body": self.answer})
        if (await receive())["type"] == "http.disconnect":
            self.seen.append("end")


Scene = Callable[[App, int], Awaitable[None]]


def serve(
    scene: Scene, *, answer_bytes: int = 2, early: bool = False, app: App | None = None, **settings: object
) -> None:
    app = app or App(answer_bytes, early)

    async def bounded() -> None:
        config = uvicorn.Config(app, lifespan="off", log_config=None, timeout_keep_alive=1)
        config.load()
        kind = Connection.under(ConnectionBounds(ServerSettings(**settings)))
        state = ServerState()
        server = await asyncio.get_running_loop().create_server(lambda: kind(config, state, {}), "127.0.0.1", 0)
        async with asyncio.timeout(PATIENCE_S), server:
            await scene(app, server.sockets[0].getsockname()[1])
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)

    asyncio.run(bounded())
