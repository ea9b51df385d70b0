"""Fields of other servers of the protocol: served, taken where they change nothing, or refused by name (C01)."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from every_case import every_case
from pydantic import BaseModel

from engine.core.messages import FinishReason, TokenOutput
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.foreign_fields import FOREIGN_FIELDS, GENERATE_FIELDS, SAMPLING_FIELDS, ForeignField
from engine.frontend.schema.native import GenerateBody, SamplingBody, parse_body

HELLO = [{"role": "user", "content": "hello"}]
Bodies = list[tuple[type[BaseModel], dict[str, Any]]]
BODIES: Bodies = [(ChatBody, {"messages": HELLO}), (CompletionBody, {"prompt": "hello"})]
NATIVE: Bodies = [(GenerateBody, {"text": "hello"})]
SAMPLING: Bodies = [(SamplingBody, {})]
FIELDS = [
    (field, bodies)
    for fields, bodies in ((FOREIGN_FIELDS, BODIES), (GENERATE_FIELDS, NATIVE), (SAMPLING_FIELDS, SAMPLING))
    for field in fields
]


@every_case(("field", "bodies"), FIELDS)
def test_a_field_is_served_or_taken_where_it_changes_nothing_or_refused(field: ForeignField, bodies: Bodies) -> None:
    for model, body in bodies:
        if field.name in model.model_fields:
            assert not field.reason or field.name in ("best_of", "echo")
            continue
        if not field.reason:
            assert field.name in bodies[0][0].model_fields
            continue
        for value in (None, *field.neutral):
            assert parse_body(model, json.dumps(body | {field.name: value}).encode()) == model(**body)
        with pytest.raises(ApiError) as caught:
            parse_body(model, json.dumps(body | {field.name: {"no": "default"}}).encode())
        assert caught.value.body.error.param == field.name
        assert field.reason in caught.value.body.error.message


@every_case(("field", "bodies"), FIELDS)
def test_a_field_that_a_reason_says_to_send_is_served(field: ForeignField, bodies: Bodies) -> None:
    sent = re.search(r"\bsend (\w+)(?: or (\w+))?$", field.reason)
    served = {name for model, _ in bodies for name in model.model_fields}
    assert sent is None or {name for name in sent.groups() if name} <= served


def test_the_salt_of_other_servers_is_cache_salt() -> None:
    with pytest.raises(ApiError, match=r"extra_key .*: send cache_salt; or leave it out"):
        parse_body(CompletionBody, json.dumps({"prompt": "a", "extra_key": "u"}).encode())


@pytest.mark.parametrize(
    ("name", "value"), [("use_beam_search", True), ("use_beam_search", 0), ("length_penalty", True)]
)
def test_a_value_of_another_type_is_not_neutral(name: str, value: object) -> None:
    with pytest.raises(ApiError, match=f"{name} .* is taken only as null"):
        parse_body(CompletionBody, json.dumps({"prompt": "a", name: value}).encode())


def answered(play, path: str, body: dict[str, Any], outputs: Sequence[TokenOutput]) -> tuple[list[Any], Any]:
    """Return a client's events for a scheduler's outputs, and the first request that the scheduler got."""
    got: list[Any] = []

    async def scene(stage) -> None:
        # Token 263 is special, and its text is hidden unless it is asked for.
        plain = stage.tokenizer.decode

        def decode(ids: Sequence[int], skip_special_tokens: bool = True) -> str:
            parts = ["<end>" * (not skip_special_tokens) if token == 263 else plain([token]) for token in ids]
            return "".join(parts)

        stage.tokenizer.decode = decode
        asked = asyncio.create_task(stage.http.post(path, json=body))
        got.append(await stage.scheduler.receive())
        await stage.scheduler.reply(*outputs)
        response = await asked
        assert response.status_code == 200, response.text
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
        got.extend(json.loads(line) for line in lines if line != "[DONE]")

    play(scene)
    return got[1:], got[0]


def output(*ids: int, end: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(rid="r", token_ids=ids, finish_reason=end, prompt_tokens=3)


SAID = (output(97, 263), output(98, 99, end=FinishReason.LENGTH))
CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"


def test_the_prompt_is_cut_to_its_end_and_ids_and_special_tokens_are_shown(play) -> None:
    asked = {"truncate_prompt_tokens": 3, "return_token_ids": True, "skip_special_tokens": False, "max_tokens": 4}
    (answer,), message = answered(play, COMPLETION, {"prompt": "abcdef", "request_id": "r", **asked}, SAID)
    assert (message.rid, message.prompt_ids) == ("r", (100, 101, 102))
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"]) == ("a<end>bc", [97, 263, 98, 99])
    assert choice["prompt_token_ids"] == [100, 101, 102]
    (chat,), message = answered(play, CHAT, {"messages": HELLO, "rid": "r", **asked}, SAID)
    assert chat["choices"][0]["message"]["content"] == "a<end>bc"
    assert chat["choices"][0]["token_ids"] == [97, 263, 98, 99]
    assert chat["prompt_token_ids"] == list(message.prompt_ids) == list(b"lo]")


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({}, "ab"),
        ({"skip_special_tokens": False}, "a<end>b"),
        ({"stop": "b"}, "a"),
        ({"stop": "b", "no_stop_trim": True, "stop_token_ids": None}, "ab"),
    ],
)
def test_special_tokens_and_stop_strings_are_shown_in_native_answers(play, asked: dict[str, Any], text: str) -> None:
    said = (output(97, 263), output(98, end=FinishReason.LENGTH))
    (answer,), _ = answered(play, "/generate", {"text": "x", "rid": "r", "sampling_params": asked}, said)
    assert answer["text"] == text


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_each_event_has_its_ids_and_the_counts_so_far(play, path: str) -> None:
    body = {"messages": HELLO} if path == CHAT else {"prompt": "abc"}
    body |= {"rid": "r", "stream": True, "stream_options": {"continuous_usage_stats": True}, "return_token_ids": True}
    events, message = answered(play, path, body, [output(263), *SAID])
    ids = [token for event in events for token in event["choices"][0].get("token_ids", ())]
    assert ids == [263, 97, 263, 98, 99]
    first = events[0] if path == CHAT else events[0]["choices"][0]
    assert first["prompt_token_ids"] == list(message.prompt_ids)
    assert sum("prompt_token_ids" in json.dumps(event) for event in events) == 1
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0] <= 1, counts[-1]) == (True, 5)
    assert all(event["usage"]["prompt_tokens"] == 3 for event in events)


@pytest.mark.parametrize(("shown", "text"), [(False, "a"), (True, "abc")])
def test_a_stop_string_ends_the_text_where_that_is_asked_for(play, shown: bool, text: str) -> None:
    body = {"prompt": "x", "rid": "r", "stop": "bc", "include_stop_str_in_output": shown}
    said = [output(97), output(98, 99, 100), output(100, end=FinishReason.LENGTH)]
    (answer,), _ = answered(play, COMPLETION, body, said)
    assert answer["choices"][0]["text"] == text


@pytest.mark.parametrize(
    ("asked", "options"),
    [
        ({}, {"add_generation_prompt": True}),
        ({"add_generation_prompt": False}, {"add_generation_prompt": False}),
        ({"continue_final_message": True}, {"add_generation_prompt": False, "continue_final_message": True}),
        ({"documents": [{"text": "d"}]}, {"add_generation_prompt": True, "documents": [{"text": "d"}]}),
    ],
)
def test_how_a_conversation_is_rendered(play, asked: dict[str, Any], options: dict[str, Any]) -> None:
    async def scene(stage) -> None:
        given: dict[str, Any] = {}

        def render(conversation: list[dict[str, str]], **said: Any) -> str:
            given.update(said)
            return "x"

        stage.template_source.chat_template = "shows documents"
        stage.template_source.apply_chat_template = render
        asking = asyncio.create_task(stage.http.post(CHAT, json={"messages": HELLO, "rid": "r", **asked}))
        await stage.scheduler.receive()
        await stage.scheduler.reply(output(97, end=FinishReason.LENGTH))
        assert (await asking).status_code == 200
        assert given == {"tokenize": False, **options}

    play(scene)


@pytest.mark.parametrize(("path", "field"), [(CHAT, "messages"), (COMPLETION, "prompt")])
def test_special_tokens_around_a_prompt(play, path: str, field: str) -> None:
    """By default a chat's template places them, and a completion gets the tokenizer's."""
    seen: list[bool] = []

    async def scene(stage) -> None:
        plain = stage.tokenizer.encode_batch_fast
        stage.tokenizer.encode_batch_fast = lambda texts, add_special_tokens: (
            seen.append(add_special_tokens) or plain(texts)
        )
        for asked in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}):
            body = {field: HELLO if path == CHAT else "a", "rid": "r", **asked}
            asking = asyncio.create_task(stage.http.post(path, json=body))
            await stage.scheduler.receive()
            await stage.scheduler.reply(output(97, end=FinishReason.LENGTH))
            assert (await asking).status_code == 200

    play(scene)
    assert seen == [path == COMPLETION, True, False]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": [{"text": "d"}]}, "documents"),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"rid": "a", "request_id": "b"}, "request_id"),
        ({"chat_template_kwargs": {"documents": []}}, "chat_template_kwargs"),
    ],
)
def test_what_cannot_be_honoured_is_refused(play, body: dict[str, Any], param: str) -> None:
    async def scene(stage) -> None:
        response = await stage.http.post(CHAT, json={"messages": HELLO, **body})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

    play(scene)


def test_ids_of_prompts_are_bounded(play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.frontend.protocols.openai.requests.MAX_PROMPT_LOGPROBS", 8)

    async def scene(stage) -> None:
        body = {"prompt": "abc", "n": 3, "return_token_ids": True}
        response = await stage.http.post(COMPLETION, json=body)
        assert response.status_code == 400
        assert "at most 8 token ids of prompts" in response.json()["error"]["message"]

    play(scene)
