"""A client that goes away: the abort is sent at once, and the request stays known until the scheduler let go of it."""

from __future__ import annotations

import asyncio

import pytest
from connections import Connection
from fastapi import Request
from starlette.requests import ClientDisconnect

from engine.core.messages import Abort, FinishReason, Generate, TokenOutput
from engine.frontend.http.body_reader import unless_gone
from engine.frontend.sessions.sessions import NativeShape


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens_before", [0, 1])
def test_disconnect_aborts_at_once(play, stream: bool, tokens_before: int) -> None:
    """C05, G10"""

    async def scene(stage) -> None:
        connection = Connection(stage.app, {"input_ids": [1], "rid": "r", "stream": stream})
        request_task = asyncio.create_task(connection.run())
        assert isinstance(await stage.scheduler.receive(), Generate)
        for number in range(tokens_before):
            await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,), completion_tokens=number + 1))
        connection.gone.set()
        assert await stage.scheduler.receive() == Abort(rid="r")
        assert stage.client.sessions.open_requests == 1
        await stage.scheduler.reply(TokenOutput(rid="r", finish_reason=FinishReason.ABORT))
        await request_task
        assert stage.client.sessions.open_requests == 0

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_is_made_for_a_client_that_has_left(play, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    """C05: a whole reply with a million logprobs would take a second."""
    made: list[object] = []
    monkeypatch.setattr(NativeShape, "whole", lambda self, answers: made.append(answers))
    monkeypatch.setattr(NativeShape, "events", lambda self, index, piece: made.append(piece) or ())

    async def scene(stage) -> None:
        connection = Connection(stage.app, {"input_ids": [1], "rid": "r", "stream": stream})
        request_task = asyncio.create_task(connection.run())
        await stage.scheduler.receive()
        connection.gone.set()
        assert await stage.scheduler.receive() == Abort(rid="r")
        for end in (None, FinishReason.ABORT):
            await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,), finish_reason=end))
        await request_task

    play(scene)
    assert not made


def test_work_on_a_body_ends_when_its_client_leaves() -> None:
    """C05: a worker that nobody waits for would keep others out."""

    async def scene() -> None:
        ended = asyncio.Event()

        async def work() -> None:
            try:
                await asyncio.Event().wait()
            finally:
                ended.set()

        async def receive() -> dict[str, str]:
            await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        with pytest.raises(ClientDisconnect):
            await unless_gone(Request({"type": "http"}, receive), work())
        async with asyncio.timeout(30):
            await ended.wait()

    asyncio.run(scene())


def test_disconnect_after_the_end_aborts_nothing(play) -> None:
    """The rid may already belong to another request."""

    async def scene(stage) -> None:
        connection = Connection(stage.app, {"input_ids": [1], "rid": "r", "stream": True})
        request_task = asyncio.create_task(connection.run())
        await stage.scheduler.receive()
        await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(97,), finish_reason=FinishReason.LENGTH))
        await request_task
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


def test_a_client_that_leaves_during_its_upload_is_no_error(play, caplog: pytest.LogCaptureFixture) -> None:
    """It used to log a traceback of 60 lines."""

    async def scene(stage) -> None:
        connection = Connection(stage.app, {"input_ids": [1]})

        async def receive() -> dict[str, object]:
            connection._asked += 1
            if connection._asked == 1:
                return {"type": "http.request", "body": b'{"text": "', "more_body": True}
            return {"type": "http.disconnect"}

        connection._receive = receive
        await connection.run()
        assert stage.client.sessions.open_requests == 0

    play(scene)
    assert caplog.records == []
