"""Answers with calls over HTTP: ended by a client, an operator or the engine in the middle of a call."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from connections import Connection

from engine.core.messages import Abort, FinishReason, Generate, TokenLogprob, TokenOutput
from engine.frontend.text.dialect import Dialect
from engine.frontend.text.reasoning import GPT_OSS, QWEN3
from engine.frontend.text.tools.families import FAMILIES

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "f", "arguments": {"a": "\u20ac"}}</tool_call>'
CHAT = "/v1/chat/completions"


def speaking(stage, *, family: str | None = "hermes", reasoning: str | None = None, template: str = "tools") -> None:
    """Have the front end parse answers, with a template that knows tools or does not."""
    stage.template_source.chat_template = template
    found = FAMILIES.get(family or "")
    stage.serve(Dialect(family=found, reasoning=reasoning, form=None if found is None else found.form))


def body(**more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "x"}], "tools": TOOLS, "rid": "r", "max_tokens": 500} | more


def said(text: str, *, end: FinishReason | None = None, rid: str = "r") -> TokenOutput:
    data = text.encode()
    return TokenOutput(rid=rid, token_ids=tuple(data), completion_tokens=len(data), finish_reason=end)


def deltas(events: bytes) -> list[dict[str, Any]]:
    """The choices of a stream's events."""
    lines = [line.removeprefix(b"data: ") for line in events.split(b"\n\n") if line]
    return [json.loads(line)["choices"][0] for line in lines if line != b"[DONE]"]


def added_up(choices: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that the deltas of a stream say."""
    message: dict[str, Any] = {"content": None, "calls": []}
    for choice in choices:
        delta = choice["delta"]
        if "content" in delta:
            message["content"] = (message["content"] or "") + delta["content"]
        for call in delta.get("tool_calls", []):
            if "id" in call:
                message["calls"].append([call["function"]["name"], ""])
            message["calls"][call["index"]][1] += call["function"].get("arguments", "")
    return message | {"reason": choices[-1]["finish_reason"]}


@pytest.mark.parametrize("tokens_before", [12, len(CALL) - 16])
def test_a_client_that_leaves_in_the_middle_of_a_call(play, tokens_before: int) -> None:
    """C05: before the call is one, and inside its arguments. The request is gone with its parser."""

    async def scene(stage) -> None:
        speaking(stage)
        connection = Connection(stage.app, body(stream=True), CHAT)
        request_task = asyncio.create_task(connection.run())
        assert isinstance(await stage.scheduler.receive(), Generate)
        await stage.scheduler.reply(said(CALL[:tokens_before]))
        while len(connection.sent) < 2:
            await asyncio.sleep(0)
        connection.gone.set()
        assert await stage.scheduler.receive() == Abort(rid="r")
        await stage.scheduler.reply(TokenOutput(rid="r", finish_reason=FinishReason.ABORT))
        await request_task
        assert stage.client.sessions.open_requests == 0

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("calls", [False, True])
def test_messages_of_gpt_oss_are_what_their_channels_say(play, stream: bool, calls: bool) -> None:
    """With tools and without: the reasoning is no content, and neither is a call."""
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    head = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    text += f'{head}{{"a": 1}}<|call|>' if calls else "<|channel|>final<|message|>Hi<|return|>"
    expected = {"content": None if calls else "Hi", "calls": [["f", '{"a": 1}']] if calls else []}

    async def scene(stage) -> None:
        speaking(stage, family="gpt_oss", reasoning=GPT_OSS)
        asked = body(stream=stream) if calls else body(stream=stream, tools=[])
        answer = asyncio.create_task(stage.http.post(CHAT, json=asked))
        await stage.scheduler.receive()
        for byte in text.encode():
            await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(byte,), completion_tokens=1))
        await stage.scheduler.reply(TokenOutput(rid="r", finish_reason=FinishReason.STOP))
        response = await answer
        assert response.status_code == 200
        if stream:
            choices = deltas(response.content)
            found = added_up(choices)
            thought = "".join(choice["delta"].get("reasoning_content") or "" for choice in choices)
        else:
            (choice,) = response.json()["choices"]
            message = choice["message"]
            made = [one["function"] for one in message.get("tool_calls") or ()]
            called = [[one["name"], one["arguments"]] for one in made]
            found = {"content": message["content"], "calls": called, "reason": choice["finish_reason"]}
            thought = message["reasoning_content"]
        assert found == expected | {"reason": "tool_calls" if calls else "stop"}
        assert thought == "hm"

    play(scene)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("text", "end", "expected"),
    [
        (CALL, FinishReason.STOP, {"content": None, "calls": [["f", '{"a": "\u20ac"}']], "reason": "tool_calls"}),
        (CALL, FinishReason.LENGTH, {"content": None, "calls": [["f", '{"a": "\u20ac"}']], "reason": "length"}),
        (CALL[:44], FinishReason.ABORT, {"content": None, "calls": [["f", '{"a": ']], "reason": "abort"}),
        (CALL[:44], FinishReason.STOP, {"content": None, "calls": [["f", '{"a": ']], "reason": "length"}),
        (CALL[:47], FinishReason.STOP, {"content": None, "calls": [["f", '{"a": "\u20ac"}']], "reason": "tool_calls"}),
        (CALL[:20], FinishReason.LENGTH, {"content": CALL[:20], "calls": [], "reason": "length"}),
        ("<tool_call>no", FinishReason.STOP, {"content": "<tool_call>no", "calls": [], "reason": "stop"}),
        (f"{CALL} x", FinishReason.STOP, {"content": "x", "calls": [["f", '{"a": "\u20ac"}']], "reason": "tool_calls"}),
        ("", FinishReason.STOP, {"content": None, "calls": [], "reason": "stop"}),
    ],
)
def test_why_an_answer_ended_and_what_there_is_of_it(play, stream: bool, text: str, end, expected) -> None:
    """vLLM pull request 9209 and SGLang pull request 7708: streamed, an answer with calls ended with ``stop``.

    vLLM issue 53269: one that was cut ended with ``tool_calls``. SGLang pull request 8417: the reason came twice.
    """

    async def scene(stage) -> None:
        speaking(stage)
        answer = asyncio.create_task(stage.http.post(CHAT, json=body(stream=stream)))
        await stage.scheduler.receive()
        for byte in text.encode():
            await stage.scheduler.reply(TokenOutput(rid="r", token_ids=(byte,), completion_tokens=1))
        await stage.scheduler.reply(TokenOutput(rid="r", finish_reason=end))
        response = await answer
        assert response.status_code == 200
        if stream:
            choices = deltas(response.content)
            assert added_up(choices) == expected
            assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
            return
        (choice,) = response.json()["choices"]
        message = choice["message"]
        calls = [[call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", [])]
        assert {"content": message["content"], "calls": calls, "reason": choice["finish_reason"]} == expected

    play(scene)


def test_calls_are_counted_whole_or_cut(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """C06: one that another one follows before it was whole, and one that the end cut."""

    monkeypatch.setattr("engine.frontend.http.routes.information.STATS_TIMEOUT_S", 0.01)

    async def scene(stage) -> None:
        speaking(stage)
        answer = asyncio.create_task(stage.http.post(CHAT, json=body()))
        await stage.scheduler.receive()
        cut = '<tool_call>{"name": "f", "arguments": {"a": \n</tool_call>'
        await stage.scheduler.reply(said(CALL + CALL + cut + CALL[:44], end=FinishReason.LENGTH))
        assert len((await answer).json()["choices"][0]["message"]["tool_calls"]) == 4
        counted = (await stage.http.get("/metrics")).text
        for end, count in (("whole", 2), ("cut", 2)):
            assert f'engine_tool_calls_total{{end="{end}",model_name="embedded"}} {count}.0' in counted

    play(scene)


def test_an_engine_s_error_in_the_middle_of_a_call_ends_the_stream_with_it(play) -> None:
    """C05: never as if it were whole."""

    async def scene(stage) -> None:
        speaking(stage)
        answer = asyncio.create_task(stage.http.post(CHAT, json=body(stream=True)))
        await stage.scheduler.receive()
        await stage.scheduler.reply(said(CALL[:44]))
        await stage.scheduler.reply(TokenOutput(rid="r", finish_reason=FinishReason.ERROR, error="it broke"))
        events = (await answer).content
        assert b"[DONE]" not in events
        assert b"it broke" in events.split(b"\n\n")[-2]

    play(scene)


def test_choices_that_come_interleaved_keep_apart(play) -> None:
    """vLLM pull request 38158: choices shared a parser."""

    async def scene(stage) -> None:
        speaking(stage)
        answer = asyncio.create_task(stage.http.post(CHAT, json=body(n=2, stream=True)))
        for _ in range(2):
            await stage.scheduler.receive()
        other = CALL.replace("\u20ac", "other")
        texts = {"r-0": CALL.encode(), "r-1": other.encode()}
        for at in range(max(map(len, texts.values()))):
            for rid, data in texts.items():
                await stage.scheduler.reply(TokenOutput(rid=rid, token_ids=tuple(data[at : at + 1])))
        for rid in texts:
            await stage.scheduler.reply(TokenOutput(rid=rid, finish_reason=FinishReason.STOP))
        choices = deltas((await answer).content)
        for index, value in enumerate(("\u20ac", "other")):
            mine = [choice for choice in choices if choice["index"] == index]
            assert added_up(mine)["calls"] == [["f", f'{{"a": "{value}"}}']]

    play(scene)


def test_reasoning_is_a_field_of_its_own_and_counted(play) -> None:
    """C01: with the tokens of it in the usage, where the marker is a token."""

    async def scene(stage) -> None:
        stage.tokenizer.token_to_id = lambda token: ord(">") if token == "</think>" else None
        speaking(stage, reasoning=QWEN3)
        for stream in (False, True):
            answer = asyncio.create_task(
                stage.http.post(
                    CHAT, json=body(stream=stream, **({"stream_options": {"include_usage": True}} if stream else {}))
                )
            )
            await stage.scheduler.receive()
            await stage.scheduler.reply(said("<think>hm</think>yes", end=FinishReason.STOP))
            response = await answer
            if stream:
                events = [json.loads(line[6:]) for line in response.text.split("\n\n") if line.startswith("data: {")]
                found = [event["choices"][0]["delta"] for event in events[:-1]]
                assert [delta.get("reasoning_content") for delta in found if "reasoning_content" in delta] == ["hm"]
                usage = events[-1]["usage"]
            else:
                message = response.json()["choices"][0]["message"]
                assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
                usage = response.json()["usage"]
            assert usage["completion_tokens_details"] == {"reasoning_tokens": len("<think>")}

    play(scene)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"family": None}, "start the server with tool_call_parser set to 'hermes' or 'llama3' or 'mistral'"),
        ({"template": "brackets"}, "tools need a chat template that shows them to the model"),
    ],
)
def test_tools_that_the_model_cannot_use_are_refused(play, change: dict[str, Any], part: str) -> None:
    """C01, C04: never left out in silence."""

    async def scene(stage) -> None:
        speaking(stage, **change)
        response = await stage.http.post(CHAT, json=body())
        assert response.status_code == 400
        assert part in response.json()["error"]["message"]
        assert response.json()["error"]["param"] == "tools"

    play(scene)


def test_a_plain_answer_is_as_it_was(play) -> None:
    """Nothing is parsed without a parser: the first delta has the empty content that clients expect."""

    async def scene(stage) -> None:
        speaking(stage)
        answer = asyncio.create_task(stage.http.post(CHAT, json=body(stream=True, tools=[])))
        await stage.scheduler.receive()
        await stage.scheduler.reply(said(CALL, end=FinishReason.STOP))
        first, *rest = deltas((await answer).content)
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert added_up(rest) == {"content": CALL, "calls": [], "reason": "stop"}

    play(scene)


def test_these_tests_notice_choices_that_share_a_parser(play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fault of vLLM pull request 38158, planted."""
    made: list[Any] = []
    parser = Dialect.parser

    def shared(dialect: Dialect, parsing: msgspec.Struct) -> Any:
        made.append(parser(dialect, parsing))
        return made[0]

    monkeypatch.setattr(Dialect, "parser", shared)
    with pytest.raises(AssertionError):
        test_choices_that_come_interleaved_keep_apart(play)


def test_logprobs_stand_beside_the_first_delta_of_a_piece_alone(play) -> None:
    """A piece that ends content and begins a call makes several deltas; its tokens have one logprob each."""

    async def scene(stage) -> None:
        speaking(stage)
        answer = asyncio.create_task(stage.http.post(CHAT, json=body(stream=True, logprobs=True)))
        await stage.scheduler.receive()
        output = said(f"Hi {CALL}", end=FinishReason.STOP)
        logprobs = tuple(TokenLogprob(logprob=-1.0) for _ in output.token_ids)
        await stage.scheduler.reply(msgspec.structs.replace(output, logprobs=logprobs))
        choices = deltas((await answer).content)
        assert added_up(choices)["calls"] == [["f", '{"a": "\u20ac"}']]
        shown = [choice["logprobs"] for choice in choices if choice.get("logprobs")]
        assert [len(one["content"]) for one in shown] == [len(output.token_ids)]

    play(scene)
