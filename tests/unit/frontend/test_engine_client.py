"""The registry of open requests and calls: every entry leaves it, for any replies of the scheduler at any time."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.core.messages import Abort, CallAnswer, ContinueGeneration, FinishReason, Generate, TokenOutput, encode
from engine.frontend.http.engine_client import MAX_OPEN_CALLS
from engine.frontend.schema.errors import ApiError


def _output(text: bytes, *, done: int, reason: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(rid="r", token_ids=tuple(text), finish_reason=reason, prompt_tokens=1, completion_tokens=done)


def _request(*, stream: bool) -> dict[str, Any]:
    return {"input_ids": [1], "rid": "r", "stream": stream, "sampling_params": {"stop": ["st"], "max_new_tokens": 4}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "pieces", [(b"a", b"st", b"b"), (b"as", b"t", b"b"), (b"a", b"b", b"st"), (b"abst",), (b"astb",), (b"asta", b"b")]
)
def test_a_stop_string_that_meets_the_length_limit_ends_the_answer_once(play, pieces: Any, stream: bool) -> None:
    """A06: the scheduler ends the request by its length before it has heard of the stop string."""

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/generate", json=_request(stream=stream)))
        assert isinstance(await stage.scheduler.receive(), Generate)
        done = 0
        for piece in pieces:
            done += len(piece)
            last = FinishReason.LENGTH if piece is pieces[-1] else None
            await stage.scheduler.reply(_output(piece, done=done, reason=last))
        response = await answer
        assert response.status_code == 200
        if stream:
            assert response.text.endswith("data: [DONE]\n\n")
            assert response.text.count('"finish_reason":"stop"') == 1
        else:
            body = response.json()
            assert body["meta_info"]["finish_reason"] == "stop"
            assert body["meta_info"]["matched_stop"] == "st"
            said = b"".join(pieces)
            assert body["output_ids"] == list(said[: said.index(b"st") + 2])
            assert body["text"] == b"".join(pieces).partition(b"st")[0].decode()
        assert stage.client.sessions.open_requests == 0

    play(scene)


def test_an_abort_that_comes_too_late_leaves_nothing_open(play) -> None:
    """The stop string is found in an output that is not the last; the last one is on its way already."""

    async def scene(stage) -> None:
        answer = asyncio.create_task(stage.http.post("/generate", json=_request(stream=False)))
        await stage.scheduler.receive()
        await stage.scheduler.reply(_output(b"st", done=2))
        assert await stage.scheduler.receive() == Abort(rid="r", finish_reason=FinishReason.STOP)
        await stage.scheduler.reply(_output(b"b", done=3, reason=FinishReason.LENGTH))
        assert (await answer).json()["meta_info"]["finish_reason"] == "stop"
        assert stage.client.sessions.open_requests == 0
        again = asyncio.create_task(stage.http.post("/generate", json=_request(stream=False)))
        assert isinstance(await stage.scheduler.receive(), Generate), "the rid is free again"
        quiet = asyncio.create_task(stage.client.wait_quiet())
        await asyncio.sleep(0)
        assert not quiet.done()
        await stage.scheduler.reply(_output(b"b", done=1, reason=FinishReason.LENGTH))
        assert (await again).status_code == 200
        await quiet

    play(scene)


def test_an_answered_call_is_no_open_call(play) -> None:
    """A04: one more call than may be open at a time, each answered before the next."""

    async def scene(stage) -> None:
        for _ in range(MAX_OPEN_CALLS + 1):
            call = asyncio.create_task(stage.client.call(lambda call_id: ContinueGeneration(call_id=call_id)))
            asked = await stage.scheduler.receive()
            await stage.scheduler.reply(CallAnswer(call_id=asked.call_id, ok=True, message="continued"))
            assert (await call).ok

    play(scene)


def test_a_call_that_is_given_up_is_no_open_call(play) -> None:
    """A04: its client went away, or it was not answered in time."""

    async def scene(stage) -> None:
        for _ in range(MAX_OPEN_CALLS + 1):
            assert await stage.client.stats(0) is None
        waiting = [
            asyncio.create_task(stage.client.call(lambda call_id: ContinueGeneration(call_id=call_id)))
            for _ in range(MAX_OPEN_CALLS)
        ]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match=f"at most {MAX_OPEN_CALLS} administrative calls"):
            await stage.client.call(lambda call_id: ContinueGeneration(call_id=call_id))
        for call in waiting:
            call.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        one_more = asyncio.create_task(stage.client.call(lambda call_id: ContinueGeneration(call_id=call_id)))
        await asyncio.sleep(0)
        assert not one_more.done()
        one_more.cancel()

    play(scene)


def test_the_served_model_is_listed_and_found_by_its_name(play) -> None:
    async def scene(stage) -> None:
        listed = (await stage.http.get("/v1/models")).json()["data"]
        assert [(model["id"], model["max_model_len"]) for model in listed] == [("embedded", 8192)]
        assert (await stage.http.get("/v1/models/embedded")).json() == listed[0]
        assert (await stage.http.get("/v1/models/another")).status_code == 404

    play(scene)


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        encode((CallAnswer(call_id="call-0", ok=True, message="not utf8?"),)).replace(b"utf8?", b"utf8\xff"),
        encode((Abort(rid="r"),)),
        encode((_output(b"x", done=1, reason=FinishReason.ERROR),)),
        encode((CallAnswer(call_id="call-9999", ok=True, message=""),)),
    ],
)
def test_a_frame_of_wrong_content_is_no_answer_and_no_end(play, frame: bytes) -> None:
    """A05: what the scheduler says after it is heard."""

    async def scene(stage) -> None:
        call = asyncio.create_task(stage.client.call(lambda call_id: ContinueGeneration(call_id=call_id)))
        asked = await stage.scheduler.receive()
        await stage.scheduler.send_garbage(frame)
        await stage.scheduler.reply(CallAnswer(call_id=asked.call_id, ok=True, message="right"))
        assert (await call).message == "right"

    play(scene)
