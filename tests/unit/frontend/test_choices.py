"""Several requests from one HTTP request: sent together, merged as they come, ended together."""

from __future__ import annotations

import asyncio
import json

import pytest
from connections import Connection

from engine.core.messages import (
    Abort,
    ContinueGeneration,
    FinishReason,
    Generate,
    Refusal,
    RefusalKind,
    TokenLogprob,
    TokenOutput,
)
from engine.frontend.sessions import sessions
from engine.frontend.sessions.sessions import HandOver, Request


def _post(stage, **body):
    body = {"prompt": [1], "rid": "r", "n": 2, **body}
    return asyncio.create_task(stage.http.post("/v1/completions", json=body))


@pytest.mark.parametrize("stream", [False, True])
def test_refusal_of_one_choice_aborts_the_other_and_has_its_status(play, stream: bool) -> None:
    """C07: half an answer is none."""

    async def scene(stage) -> None:
        answer = _post(stage, stream=stream)
        assert [(await stage.scheduler.receive()).rid for _ in range(2)] == ["r-0", "r-1"]
        await stage.scheduler.reply(Refusal(rid="r-1", kind=RefusalKind.BUSY, message="full"))
        assert await stage.scheduler.receive() == Abort(rid="r-0")
        response = await answer
        assert (response.status_code, response.json()["error"]["message"]) == (429, "full")
        assert stage.client.sessions.open_requests == 1
        await stage.scheduler.reply(TokenOutput(rid="r-0", finish_reason=FinishReason.ABORT))
        while stage.client.sessions.open_requests:
            await asyncio.sleep(0)

    play(scene)


def test_live_rid_of_one_choice_sends_no_half(play) -> None:
    """A client that leaves costs no more steps, and a live rid is refused (C05)."""

    async def scene(stage) -> None:
        single = asyncio.create_task(stage.http.post("/generate", json={"input_ids": [1], "rid": "r-1"}))
        await stage.scheduler.receive()
        assert (await _post(stage)).status_code == 409
        await stage.scheduler.reply(TokenOutput(rid="r-1", finish_reason=FinishReason.LENGTH))
        assert (await single).status_code == 200
        again = _post(stage)
        assert (await stage.scheduler.receive()).rid == "r-0"
        assert (await stage.scheduler.receive()).rid == "r-1"
        for rid in ("r-0", "r-1"):
            await stage.scheduler.reply(TokenOutput(rid=rid, finish_reason=FinishReason.LENGTH))
        assert (await again).status_code == 200

    play(scene)


def _out_of_time(rid: str, *tokens: int) -> TokenOutput:
    error = "not ended after 1 s, timeout_s is 1; allow more time"
    end = {"finish_reason": FinishReason.TIMEOUT, "error": error, "completion_tokens": len(tokens)}
    return TokenOutput(rid=rid, token_ids=tokens, **end)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_answer_without_a_token_in_time_is_504(play, stream: bool, n: int) -> None:
    """Streaming or not, of one choice or more."""

    async def scene(stage) -> None:
        answer = _post(stage, stream=stream, n=n, timeout_s=1)
        messages = [await stage.scheduler.receive() for _ in range(n)]
        assert {message.timeout_s for message in messages} == {1.0}
        for message in messages:
            await stage.scheduler.reply(_out_of_time(message.rid))
        response = await answer
        assert response.status_code == 504
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("time_limit", 504)
        assert "timeout_s is 1" in error["message"]

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_keep_what_they_have_in_time(play, stream: bool) -> None:
    """C07: an end of time is an answer's own end, and takes nothing from another choice."""

    async def scene(stage) -> None:
        answer = _post(stage, stream=stream, n=3)
        for _ in range(3):
            await stage.scheduler.receive()
        await stage.scheduler.reply(_out_of_time("r-0"))
        await stage.scheduler.reply(TokenOutput(rid="r-1", token_ids=(97,), completion_tokens=1))
        await stage.scheduler.reply(_out_of_time("r-1", 98))
        await stage.scheduler.reply(_out_of_time("r-2"))
        response = await answer
        assert response.status_code == 200
        if stream:
            lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
            assert lines.pop() == "[DONE]"
            parts = [choice for line in lines for choice in json.loads(line)["choices"]]
        else:
            parts = response.json()["choices"]
        texts, ends = ["", "", ""], [0, 0, 0]
        for part in parts:
            texts[part["index"]] += part["text"]
            ends[part["index"]] += part["finish_reason"] == "timeout"
        assert (texts, ends) == (["", "ab", ""], [1, 1, 1])

    play(scene)


def test_seed_counts_up_with_the_choices_of_each_prompt(play) -> None:
    """C02: the choices of a prompt differ, equal prompts get equal choices."""

    async def scene(stage) -> None:
        answer = _post(stage, prompt=[[1], [1]], seed=5, max_tokens=1)
        messages = [await stage.scheduler.receive() for _ in range(4)]
        assert [message.sampling.seed for message in messages] == [5, 6, 5, 6]
        for number, message in enumerate(messages):
            await stage.scheduler.reply(
                TokenOutput(
                    rid=message.rid,
                    token_ids=(97 + number,),
                    finish_reason=FinishReason.LENGTH,
                    prompt_tokens=3,
                    completion_tokens=1,
                )
            )
        body = (await answer).json()
        assert [choice["text"] for choice in body["choices"]] == ["a", "b", "c", "d"]
        assert (body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]) == (6, 4)

    play(scene)


@pytest.mark.parametrize(
    ("content", "messages", "part"),
    [
        ("brackets", [{"role": "assistant", "content": "x"}], "the last message must be the user's"),
        (None, [{"role": "user", "content": "x"}], "this model's tokenizer has none"),
    ],
)
def test_template_s_refusal_is_the_client_s_error(play, content, messages, part: str) -> None:
    """The chat template is the tokenizer's (C04)."""

    async def scene(stage) -> None:
        stage.template_source.chat_template = content
        response = await stage.http.post("/v1/chat/completions", json={"messages": messages})
        assert response.status_code == 400
        assert part in response.json()["error"]["message"]

    play(scene)


def test_chat_without_a_limit_takes_the_room_that_is_there(play) -> None:
    """B09: the default of a chat never makes it unservable."""

    async def scene(stage) -> None:
        body = {"messages": [{"role": "user", "content": "hi"}]}
        answer = asyncio.create_task(stage.http.post("/v1/chat/completions", json=body))
        message = await stage.scheduler.receive()
        assert bytes(message.prompt_ids) == b"[user:hi]"
        assert len(message.prompt_ids) + message.sampling.max_new_tokens == 33
        await stage.scheduler.reply(TokenOutput(rid=message.rid, finish_reason=FinishReason.LENGTH))
        assert (await answer).status_code == 200

    play(scene, max_total_tokens=32)


def test_part_of_a_character_is_named_by_its_bytes(play) -> None:
    """Sampling, logprobs, stops and choices are what was asked for (C02)."""

    async def scene(stage) -> None:
        answer = _post(stage, n=1, logprobs=0)
        await stage.scheduler.receive()
        logprobs = (TokenLogprob(-0.5),) * 4
        ids = tuple("\u20aca".encode())
        await stage.scheduler.reply(
            TokenOutput(rid="r", token_ids=ids, logprobs=logprobs, finish_reason=FinishReason.LENGTH)
        )
        (choice,) = (await answer).json()["choices"]
        assert choice["text"] == "\u20aca"
        assert choice["logprobs"]["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac", "a"]
        assert choice["logprobs"]["text_offset"] == [0, 0, 0, 1]

    play(scene)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"text": "\\ud800", "prompt": "\\ud800"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "rid": "\\udfff"}',
        b'{"chat_template_kwargs": ' + b'{"a":' * 3000 + b"1" + b"}" * 3000 + b"}",
        b"\xff\xfe",
        b"null",
        b'{"prompt": 1e999}',
    ],
)
def test_hostile_json_is_400(play, path: str, body: bytes) -> None:
    """A05, C01: half characters, bottomless nesting, no JSON at all."""

    async def scene(stage) -> None:
        response = await stage.http.post(path, content=body)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["type"] == "invalid_request_error"

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_the_choices_that_a_client_did_not_wait_for_are_never_sent(
    play, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """C05: the loop turns between the choices of a long prompt, and the client may leave there."""
    monkeypatch.setattr(sessions, "TOKENS_A_TURN", 3)

    async def scene(stage) -> None:
        body = {"prompt": [1, 2, 3], "rid": "r", "n": 5, "stream": stream}
        connection = Connection(stage.app, body, "/v1/completions")
        start = stage.client.sessions.start

        def start_and_leave(message: Generate, hand_over: HandOver) -> Request:
            if message.rid == "r-1":
                connection.gone.set()
            return start(message, hand_over)

        stage.client.sessions.start = start_and_leave
        request_task = asyncio.create_task(connection.run())
        messages = [await stage.scheduler.receive() for _ in range(4)]
        assert [type(message) for message in messages] == [Generate, Generate, Abort, Abort]
        assert [message.rid for message in messages] == ["r-0", "r-1", "r-0", "r-1"]
        assert stage.client.sessions.open_requests == 2
        for rid in ("r-0", "r-1"):
            assert not request_task.done()
            await stage.scheduler.reply(TokenOutput(rid=rid, finish_reason=FinishReason.ABORT))
        await request_task
        assert stage.client.sessions.open_requests == 0
        # The next thing that the scheduler hears is not a third choice.
        call = asyncio.create_task(stage.http.post("/continue_generation"))
        assert isinstance(await stage.scheduler.receive(), ContinueGeneration)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    play(scene)


@pytest.mark.parametrize(("tokens_a_turn", "turns"), [(3, 4), (6, 2), (100, 0)])
def test_the_loop_turns_between_the_choices_of_a_long_prompt(
    play, monkeypatch: pytest.MonkeyPatch, tokens_a_turn: int, turns: int
) -> None:
    """64 choices of 131,072 tokens kept every stream waiting for 50 ms; their order is the same."""
    monkeypatch.setattr(sessions, "TOKENS_A_TURN", tokens_a_turn)

    async def scene(stage) -> None:
        sent_in: list[int] = []
        turn = 0
        start = stage.client.sessions.start

        def start_and_note(message: Generate, hand_over: HandOver) -> Request:
            sent_in.append(turn)
            return start(message, hand_over)

        stage.client.sessions.start = start_and_note
        answer = _post(stage, prompt=[1, 2, 3], n=5, max_tokens=1)
        while len(sent_in) < 5:
            turn += 1
            await asyncio.sleep(0)
        assert len(set(sent_in)) == turns + 1
        rids = [(await stage.scheduler.receive()).rid for _ in range(5)]
        assert rids == [f"r-{index}" for index in range(5)]
        for rid in rids:
            await stage.scheduler.reply(TokenOutput(rid=rid, token_ids=(97,), finish_reason=FinishReason.LENGTH))
        assert (await answer).status_code == 200

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_every_choice(play, stream: bool) -> None:
    """A client that leaves costs no more steps, and a live rid is refused (C05)."""

    async def scene(stage) -> None:
        connection = Connection(stage.app, {"prompt": [1], "rid": "r", "n": 2, "stream": stream}, "/v1/completions")
        request_task = asyncio.create_task(connection.run())
        for _ in range(2):
            await stage.scheduler.receive()
        connection.gone.set()
        assert {(await stage.scheduler.receive()).rid for _ in range(2)} == {"r-0", "r-1"}
        for rid in ("r-0", "r-1"):
            await stage.scheduler.reply(TokenOutput(rid=rid, finish_reason=FinishReason.ABORT))
        await request_task
        assert stage.client.sessions.open_requests == 0

    play(scene)


def test_choices_say_how_many_they_are_and_which_is_the_first(play) -> None:
    """C07: they enter the queue together or not at all."""

    async def scene(stage) -> None:
        answer = _post(stage)
        sent = [await stage.scheduler.receive() for _ in range(2)]
        assert [(one.choices, one.first_choice) for one in sent] == [(2, "r-0"), (2, "r-0")]
        for one in sent:
            await stage.scheduler.reply(TokenOutput(rid=one.rid, token_ids=(65,), finish_reason=FinishReason.LENGTH))
        assert (await answer).status_code == 200

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
def test_usage_and_prompt_ids_are_of_each_prompt_and_not_of_each_choice(play, stream: bool) -> None:
    """C02: cached tokens count once for a prompt, in each tier, and each choice has its own prompt's ids."""

    async def scene(stage) -> None:
        more = {"stream": stream, "stream_options": {"include_usage": True}} if stream else {}
        more |= {"return_token_ids": True, "return_cached_tokens_details": True}
        answer = _post(stage, prompt=[[1, 2, 3], [4, 5]], **more)
        for cached, on_host in ((5, 3), (6, 1), (4, 2), (5, 1)):
            message = await stage.scheduler.receive()
            await stage.scheduler.reply(
                TokenOutput(
                    rid=message.rid,
                    token_ids=(65,),
                    completion_tokens=1,
                    cached_tokens=cached,
                    cached_tokens_host=on_host,
                    finish_reason=FinishReason.LENGTH,
                )
            )
        response = await answer
        events = [] if stream else [response.json()]
        if stream:
            lines = [line.removeprefix(b"data: ") for line in response.content.split(b"\n\n") if line]
            events = [json.loads(line) for line in lines if line != b"[DONE]"]
        found = {choice["index"]: choice["prompt_token_ids"] for event in events for choice in event["choices"]}
        assert found == {0: [1, 2, 3], 1: [1, 2, 3], 2: [4, 5], 3: [4, 5]}
        usage = events[-1]["usage"]
        assert usage["prompt_tokens"] == 5
        assert usage["prompt_tokens_details"]["cached_tokens"] == 5 + 4
        tiers = [event["sglext"]["cached_tokens_details"] for event in events if "sglext" in event]
        assert tiers == [{"device": 2 + 2, "host": 3 + 2}]
        assert usage["completion_tokens"] == 4

    play(scene)
