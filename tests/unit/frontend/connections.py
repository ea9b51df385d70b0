"""HTTP exchanges at the ASGI level, for tests of clients that go away."""

from __future__ import annotations

import asyncio
import json


class Connection:
    """One HTTP request at the ASGI level, whose client can go away at any moment."""

    def __init__(
        self, app, body: dict[str, object], path: str = "/generate", *, extensions: dict[str, object] | None = None
    ) -> None:
        self._app = app
        self._extensions = extensions or {}
        self._path = path
        self._body = json.dumps(body).encode()
        self._asked = 0
        self.gone = asyncio.Event()
        self.sent: list[dict[str, object]] = []

    async def run(self) -> None:
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "headers": [],
            "scheme": "http",
            "extensions": self._extensions,
        }
        await self._app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, object]:
        self._asked += 1
        if self._asked == 1:
            return {"type": "http.request", "body": self._body, "more_body": False}
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, object]) -> None:
        self.sent.append(message)
