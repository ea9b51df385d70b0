"""A client that goes away: the abort is sent at once, and the request stays known until the scheduler let go of it."""

from __future__ import annotations

import asyncio

import pytest
from connections import Connection

from engine.messages import Abort, FinishReason, Generate, TokenOutput


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
