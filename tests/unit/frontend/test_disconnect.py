"""A client that goes away: the abort is sent at once, and the request stays known until the scheduler let go of it."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine.messages import Abort, FinishReason, Generate, TokenOutput


class Connection:
    """One HTTP exchange at the ASGI level, whose client can go away at any moment."""

    def __init__(self, app, body: dict[str, object]) -> None:
        self._app = app
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
            "path": "/generate",
            "raw_path": b"/generate",
            "query_string": b"",
            "headers": [],
            "scheme": "http",
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


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 1])
def test_disconnect_aborts_at_once(play, stream: bool, tokens_before: int) -> None:
    """C05, G10"""

    async def scene(stage) -> None:
        connection = Connection(stage.app, {"input_ids": [1], "rid": "r", "stream": stream})
        exchange = asyncio.create_task(connection.run())
        assert isinstance(await stage.scheduler.receive(), Generate)
        for number in range(tokens_before):
            await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,), completion_tokens=number + 1))
        connection.gone.set()
        assert await stage.scheduler.receive() == Abort(rid="r")
        assert stage.client.open_requests == 1
        await stage.scheduler.reply(TokenOutput(rid="r", finish_reason=FinishReason.ABORT))
        await exchange
        assert stage.client.open_requests == 0

    play(scene)


def test_disconnect_after_the_end_aborts_nobody(play) -> None:
    """The rid may already belong to another request."""

    async def scene(stage) -> None:
        connection = Connection(stage.app, {"input_ids": [1], "rid": "r", "stream": True})
        exchange = asyncio.create_task(connection.run())
        await stage.scheduler.receive()
        await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,), finish_reason=FinishReason.LENGTH))
        await exchange
        second = asyncio.create_task(stage.http.post("/generate", json={"input_ids": [1], "rid": "r"}))
        await stage.scheduler.receive()
        connection.gone.set()
        call = asyncio.create_task(stage.http.post("/continue_generation"))
        assert (await stage.scheduler.receive()).call_id == "call-0"
        await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,), finish_reason=FinishReason.LENGTH))
        assert (await second).status_code == 200
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    play(scene)
