"""A stream's events: written at once where the connection has room, all that is there in one write, and never lost."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
from typing import Any

import pytest
from connections import Connection
from msgspec.structs import replace

from engine.core.messages import FinishReason, Generate, TokenLogprob, TokenOutput
from engine.frontend.http.routes.generation import PART_WRITER, TURNS_OF_A_TOKEN
from engine.frontend.sessions.sessions import OUTPUTS_A_TURN, Session


class Writer:
    """A connection that writes parts, and may have no room for them."""

    def __init__(self) -> None:
        self.has_room = True
        self.written: list[bytes] = []

    def write_part(self, data: bytes) -> None:
        assert self.has_room
        self.written.append(data)


def _streaming(stage, writer: Writer | None = None, **body: object) -> Connection:
    extensions = {} if writer is None else {PART_WRITER: writer}
    body = {"input_ids": [1], "rid": "r", "stream": True, **body}
    return Connection(stage.app, body, extensions=extensions)


def _output(number: int, *, last: bool = False) -> TokenOutput:
    return TokenOutput(
        rid="r",
        token_ids=(97 + number % 26,),
        completion_tokens=number + 1,
        finish_reason=FinishReason.LENGTH if last else None,
    )


def _sent(connection: Connection) -> list[bytes]:
    return [message["body"] for message in connection.sent if message.get("body")]


def _texts(data: bytes) -> list[str]:
    """The texts of events, the last of which closes the stream."""
    *events, done, rest = data.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: "))["text"] for event in events]


async def _until(condition) -> None:
    while not condition():
        await asyncio.sleep(0)


@pytest.mark.parametrize("writes", [False, True])
def test_what_comes_together_goes_in_one_write(play, writes: bool) -> None:
    """Sampling, logprobs, stops and choices are what was asked for (C02).

    A client that leaves costs no more steps, and a live rid is refused (C05).
    """

    async def scene(stage) -> None:
        writer = Writer()
        connection = _streaming(stage, writer if writes else None)
        request_task = asyncio.create_task(connection.run())
        assert isinstance(await stage.scheduler.receive(), Generate)
        await stage.scheduler.reply(_output(0))
        await _until(lambda: _sent(connection))
        await stage.scheduler.reply(*(_output(number) for number in range(1, 9)))
        await stage.scheduler.reply(_output(9, last=True))
        await request_task
        parts = [*_sent(connection)[:1], *writer.written, *_sent(connection)[1:]]
        assert _texts(b"".join(parts)) == [chr(97 + number) for number in range(10)]
        assert len(parts) <= 3
        assert bool(writer.written) <= writes

    play(scene)


def test_a_token_is_written_without_waking_the_stream(play) -> None:
    async def scene(stage) -> None:
        writer = Writer()
        connection = _streaming(stage, writer)
        request_task = asyncio.create_task(connection.run())
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output(0))
        await _until(lambda: _sent(connection))
        for number in range(1, 4):
            await stage.scheduler.reply(_output(number))
            await _until(lambda number=number: len(writer.written) == number)
        assert len(_sent(connection)) == 1
        await stage.scheduler.reply(_output(4, last=True))
        await request_task
        first, last = _sent(connection)
        assert _texts(b"".join([first, *writer.written, last])) == list("abcde")

    play(scene)


def test_a_client_that_takes_nothing_holds_its_own_outputs_alone(play) -> None:
    """They wait as they came, a bounded number becomes events in a turn, and their order stays."""

    async def scene(stage) -> None:
        writer = Writer()
        writer.has_room = False
        connection = _streaming(stage, writer)
        room = asyncio.Event()

        async def send(message: dict[str, object]) -> None:
            if _sent(connection):
                await room.wait()
            connection.sent.append(message)

        connection._send = send
        request_task = asyncio.create_task(connection.run())
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output(0))
        await _until(lambda: _sent(connection))
        count = 3 * OUTPUTS_A_TURN
        await stage.scheduler.reply(*(_output(number) for number in range(1, count)), _output(count, last=True))
        await _until(lambda: not stage.client.sessions.open_requests)
        assert (len(_sent(connection)), writer.written) == (1, [])
        room.set()
        await request_task
        parts = _sent(connection)
        assert _texts(b"".join(parts)) == [chr(97 + number % 26) for number in range(count + 1)]
        assert max(part.count(b"data:") for part in parts) <= OUTPUTS_A_TURN + 1

    play(scene)


@pytest.mark.parametrize("writes", [False, True])
def test_an_error_comes_after_what_came_before_it(play, writes: bool) -> None:
    """C07: the tokens of the same step are sent, the stream is not closed as one that ended in order."""

    async def scene(stage) -> None:
        writer = Writer()
        connection = _streaming(stage, writer if writes else None)
        request_task = asyncio.create_task(connection.run())
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output(0))
        await _until(lambda: _sent(connection))
        failed = TokenOutput(rid="r", finish_reason=FinishReason.ERROR, error="stage 1 failed")
        await stage.scheduler.reply(_output(1), failed)
        await request_task
        first, *sent = _sent(connection)
        data = b"".join([first, *writer.written, *sent]).decode()
        a, b, error = [json.loads(event.removeprefix("data: ")) for event in data.split("\n\n") if event]
        assert (a["text"], b["text"], error["error"]["message"]) == ("a", "b", "stage 1 failed")

    play(scene)


def test_a_mistake_in_the_front_end_ends_the_stream_and_is_logged(
    play, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A06: it happens in a callback, and must not leave the client waiting."""

    async def scene(stage) -> None:
        connection = _streaming(stage, Writer())
        request_task = asyncio.create_task(connection.run())
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output(0))
        await _until(lambda: _sent(connection))
        with monkeypatch.context() as patch:
            patch.setattr("engine.frontend.text.answer.Answer.piece", lambda *_: 1 / 0)
            await stage.scheduler.reply(_output(1))
            with pytest.raises(ZeroDivisionError):
                await request_task

    with caplog.at_level(logging.ERROR, logger="asyncio"):
        play(scene)
    assert not caplog.records, "nothing is left to the event loop's own handler"


@pytest.mark.parametrize("work", ["collect", "body"])
def test_a_whole_answer_leaves_turns_to_tokens_of_others(play, monkeypatch: pytest.MonkeyPatch, work: str) -> None:
    """Outputs that had come were taken in one turn, and a token waited for three parts of a large answer."""
    turn, worked_at = 0, []

    def noted(session: Session) -> Any:
        worked_at.append(turn)
        return collect(session)

    def noted_parts(session: Session) -> Any:
        shaping = body(session)
        while True:
            worked_at.append(turn)
            try:
                yield next(shaping)
            except StopIteration as done:
                return done.value

    collect, body = Session.collect, Session.body
    monkeypatch.setattr(Session, work, noted if work == "collect" else noted_parts)
    monkeypatch.setattr("engine.frontend.sessions.sessions.VALUES_A_TURN", 50)

    async def scene(stage) -> None:
        async def count() -> None:
            nonlocal turn
            while True:
                turn += 1
                await asyncio.sleep(0)

        asked = {"input_ids": [1], "rid": "r", "return_logprob": True, "top_logprobs_num": 2}
        answer, counting = asyncio.create_task(stage.http.post("/generate", json=asked)), asyncio.create_task(count())
        await stage.scheduler.receive()
        for number in range(5 * OUTPUTS_A_TURN):
            stage.client.sessions.take(replace(_output(number), logprobs=(TokenLogprob(-1.0, ((1, -1.0),)),)))
        stage.client.sessions.take(_output(number + 1, last=True))
        assert (await answer).status_code == 200
        counting.cancel()

    play(scene)
    assert len(worked_at) > 4
    turns = [after - before for before, after in itertools.pairwise(worked_at)]
    assert min(turns) >= (1 if work == "collect" else TURNS_OF_A_TOKEN)
