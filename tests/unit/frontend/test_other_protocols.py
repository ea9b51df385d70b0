"""``/v1/responses`` and ``/v1/messages``: other words for a chat, whole and as a stream, on a model that recites."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from real_servers import RealServer, running
from reciting_model import write_reciting_model

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import FinishReason, Generate, SamplingParams, TokenOutput
from engine.frontend.protocols.anthropic import CountTokensBody, MessageShape
from engine.frontend.protocols.openai.chat_blocks import SpokenChoice
from engine.frontend.protocols.openai.response_bodies import ResponseBody
from engine.frontend.protocols.openai.response_shapes import MAX_SHOWN_BYTES
from engine.frontend.protocols.openai.shapes import ChatShape
from engine.frontend.schema.native import CachedTokensDetails, GenerateAnswer, MetaInfo
from engine.frontend.sessions.requests import Order, ServedModel
from engine.frontend.sessions.sessions import finished
from engine.frontend.text.dialect import PLAIN, AnswerParser
from engine.frontend.text.tokenizer import load_tokenizer
from engine.frontend.text.tools.families import HermesParser
from engine.server.launch.preload import PreloadedParent

REASONING = "Two products. Not <tool_call> yet."
CALLS = (
    f"<think>\n{REASONING}\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "why": "\u20ac \U0001f98a"}}\n</tool_call>'
)
ARGUMENTS = [{"a": 17, "b": 23}, {"a": 1, "why": "\u20ac \U0001f98a"}]
ANSWER = "It is 395."
QUESTION = "17 * 23 + 1?"
TOOLS: list[Any] = [
    {"type": "function", "name": "multiply", "parameters": {"type": "object"}},
    {"type": "function", "name": "add", "description": "a sum", "parameters": {}},
]
MESSAGES_TOOLS = [{"name": "multiply", "input_schema": {"type": "object"}}, {"name": "add", "input_schema": {}}]
USER = {"role": "user", "content": QUESTION}


@pytest.fixture(scope="module")
def server(parent: PreloadedParent, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("model")
    write_reciting_model(folder, [CALLS, ANSWER], special=["<think>", "</think>"])
    with running(parent, tmp_path_factory.mktemp("s"), model=str(folder), served_model_name="m") as started:
        yield started


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=20) as made:
        yield made


def respond(client: openai.OpenAI, **more: Any) -> Any:
    return client.responses.create(**({"model": "m", "input": QUESTION, "tools": TOOLS, "temperature": 0} | more))


def test_a_messages_choice_of_tools_is_a_chats() -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice, due in (
        (None, None),
        ({"type": "auto"}, "auto"),
        ({"type": "any"}, "required"),
        ({"type": "none"}, "none"),
        ({"type": "tool", "name": "add"}, named),
    ):
        body = CountTokensBody(model="m", messages=[USER], tools=MESSAGES_TOOLS, tool_choice=choice)
        assert body.chat_fields["tool_choice"] == due


SAID = "Let me see."
CALLED = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
ENDS: dict[FinishReason, tuple[str, str]] = {
    FinishReason.STOP: ("stop", "end_turn"),
    FinishReason.LENGTH: ("length", "max_tokens"),
    FinishReason.ABORT: ("abort", "abort"),
}


@pytest.mark.parametrize("reason", ENDS)
def test_a_reply_with_a_call_ends_for_its_tool_wherever_the_call_is(reason: FinishReason) -> None:
    """In a chat and in a message, in whole replies and in streams; a reply that was cut does not."""
    config = EngineConfig()
    served = ServedModel(*load_tokenizer(config), Limits.of(config, EMBEDDED_FACTS), "m", PLAIN)
    message = Generate(rid="r", prompt_ids=(1,), sampling=SamplingParams())
    order = Order(rid="r", messages=(message,), stream=True)
    for parts in itertools.product((SAID, CALLED), repeat=3):
        counts = CachedTokensDetails(device=0, host=0)
        meta = MetaInfo(
            id="r", finish_reason=reason, prompt_tokens=1, completion_tokens=1, cached_tokens=0,
            cached_tokens_details=counts,
        )  # fmt: skip
        piece = GenerateAnswer(text="\n".join(parts), output_ids=(1,), meta_info=meta)

        def new_choice() -> SpokenChoice:
            return SpokenChoice(AnswerParser(None, HermesParser({"add"}), parallel=True))

        calls = CALLED in parts and reason is FinishReason.STOP
        chat, told = ("tool_calls", "tool_use") if calls else ENDS[reason]
        assert finished(ChatShape(order, served, new_choice).whole([piece])).choices[0].finish_reason == chat
        assert finished(MessageShape(order, served, new_choice).whole([piece])).stop_reason == told, parts
        shape = MessageShape(order, served, new_choice)
        assert list(shape.events(0, piece))
        assert next(iter(shape.last_events())).delta.stop_reason == told


def test_a_users_message_without_blocks_is_an_empty_text() -> None:
    told = [USER, {"role": "assistant", "content": "yes"}, {"role": "user", "content": []}]
    *_, last = CountTokensBody(model="m", messages=told).chat_fields["messages"]
    assert last == {"role": "user", "content": ""}


def without_ids(response: Any) -> dict[str, Any]:
    shown: dict[str, Any] = response.model_dump(exclude={"id", "created_at", "usage"})
    for item in shown["output"]:
        del item["id"]
        item.pop("call_id", None)
        item.pop("parsed_arguments", None)
        for part in item.get("content") or ():
            part.pop("parsed", None)
    return shown


def message(server: RealServer, **more: Any) -> Any:
    asked = {"model": "m", "max_tokens": 500, "messages": [USER], "tools": MESSAGES_TOOLS, "temperature": 0} | more
    return server.http.post("/v1/messages", json=asked)


def events_of(text: str) -> list[dict[str, Any]]:
    """The data of each event, which has its type as its name."""
    found = []
    for event in text.strip().split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def test_a_response_has_its_reasoning_its_text_and_its_calls(client: openai.OpenAI) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01).

    Operators see and do what the routes promise (C06).
    """
    response = respond(client, instructions="Compute.", metadata={"k": "v"})
    reasoning, text, *calls = response.output
    assert (reasoning.type, reasoning.content[0].text) == ("reasoning", REASONING)
    assert (text.type, response.output_text) == ("message", "Let me see.")
    assert [(call.type, call.name) for call in calls] == [("function_call", "multiply"), ("function_call", "add")]
    assert [json.loads(call.arguments) for call in calls] == ARGUMENTS
    assert len({item.id for item in response.output}) == 4
    assert (response.status, response.store, response.instructions) == ("completed", False, "Compute.")
    assert (response.metadata, [tool.name for tool in response.tools]) == ({"k": "v"}, ["multiply", "add"])
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < response.usage.output_tokens


def test_the_events_of_a_response_add_up_to_it(client: openai.OpenAI) -> None:
    """C03: the client's own accumulator comes to the same, ids apart; every item begins and ends once."""
    with client.responses.stream(model="m", input=QUESTION, tools=TOOLS, temperature=0) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert without_ids(final) == without_ids(respond(client))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1].type == "response.completed"
    for edge in ("added", "done"):
        places = [event.output_index for event in events if event.type == f"response.output_item.{edge}"]
        assert places == [0, 1, 2, 3]
    pieces = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(pieces) == REASONING
    assert len(pieces) > 3


def test_a_response_goes_on_with_the_items_of_the_one_before(client: openai.OpenAI) -> None:
    """The items of an answer are one message of the assistant: the model's second turn is its second answer."""
    first = respond(client)
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "395"}
        for item in first.output
        if item.type == "function_call"
    ]
    for items in (first.output, [item.model_dump() for item in first.output]):
        assert respond(client, input=[USER, *items, *results]).output_text == ANSWER


def test_a_response_that_is_cut_says_so(client: openai.OpenAI) -> None:
    for stream in (False, True):
        response = respond(client, max_output_tokens=5, stream=stream)
        response = list(response)[-1].response if stream else response
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert [item.status for item in response.output] == ["incomplete"]


def test_a_response_keeps_to_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"], "additionalProperties": False}
    asked = {"format": {"type": "json_schema", "name": "s", "schema": schema}}
    response = respond(client, tools=[], text=asked, max_output_tokens=200, extra_body={"min_p": 0.0})
    assert response.text.format.schema_ == schema
    assert response.output_text.lstrip().startswith("{") or response.output[0].type == "reasoning"


RESPONSE_REFUSALS = [
    ({"previous_response_id": "resp_1"}, "previous_response_id", "must be null"),
    ({"store": True}, "store", "must be false, got true: nothing is stored"),
    ({"store": 0}, "store", "must be false, got 0: nothing is stored"),
    ({"background": 0.0}, "background", "must be false, got 0.0: nothing is stored"),
    ({"input": []}, "input", ">= 1 entries"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "'message', 'function_call'"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0", "'input_text'"),
    ({"input": [USER] * 5000}, "input", "input must have <= 4096 entries, got 5000 entries"),
    ({"max_output_tokens": 10**6}, "max_output_tokens", "max_output_tokens must be <= "),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'message.output_text.logprobs' in include"),
    ({"include": ["message.output_text.logprobs"]}, "include", "an output of only text"),
    ({"tools": [{"type": "web_search"}]}, "tools.0.type", "must be 'function'"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools", "'multiply' twice"),
    ({"tools": [], "tool_choice": "required"}, "tool_choice", "tool_choice needs tools"),
    ({"tools": [TOOLS[0] | {"strict": True, "parameters": {"type": "array"}}]}, "tools.0.parameters", "an object"),
    (
        {"tools": [], "text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "?"}}}},
        "text.format",
        "?",
    ),
    ({"foo": 1}, "foo", "is not a field here"),
    ({"input": [{"type": "reasoning", "foo": 1}]}, "input.0.foo", "the fields are id, status, type, summary"),
    ({"model": "gpt"}, "model", "must be 'm'"),
    ({"input": [{"type": "function_call_output", "call_id": "", "output": "x"}]}, "input.0.call_id", ">= 1"),
]


@pytest.mark.parametrize(("fields", "param", "words"), RESPONSE_REFUSALS)
def test_a_response_is_refused_by_the_name_of_its_field(
    server: RealServer, fields: dict[str, Any], param: str, words: str
) -> None:
    body = {"model": "m", "input": QUESTION, "tools": TOOLS} | fields
    refused = server.http.post("/v1/responses", json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (404 if param == "model" else 400, param)
    assert words in error["message"]


MESSAGE_REFUSALS = [
    ({"max_tokens": 0}, "max_tokens", ">= 1"),
    ({"max_tokens": 10**6}, "max_tokens", "max_tokens must be <= "),
    ({"messages": []}, "messages", ">= 1"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages.0", "'user'"),
    ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0", "'tool_result'"),
    ({"tools": [MESSAGES_TOOLS[0]] * 2}, "tools", "'multiply' twice"),
    ({"tools": [], "tool_choice": {"type": "any"}}, "tool_choice", "tool_choice needs tools, but there are none"),
    (
        {"tools": [{"name": "stop", "input_schema": {}}], "tool_choice": {"type": "tool", "name": "x"}},
        "tool_choice",
        "'stop'",
    ),
    ({"tools": [{"name": "f", "strict": True, "input_schema": {"type": "array"}}]}, "tools.0.input_schema", "object"),
    ({"stop_sequences": ["x"] * 17}, "stop_sequences", "16"),
    ({"mcp_servers": []}, "mcp_servers", "is not a field here"),
]


@pytest.mark.parametrize(("fields", "param", "words"), MESSAGE_REFUSALS)
def test_a_message_is_refused_by_the_name_of_its_field(
    server: RealServer, fields: dict[str, Any], param: str, words: str
) -> None:
    refused = message(server, **fields)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"]) == (400, param)
    assert words in error["message"]


def test_the_remedy_leaves_no_field_out_that_a_protocol_requires(server: RealServer) -> None:
    """C01: max_tokens of a message is not optional."""
    assert message(server, max_tokens=10**6).json()["error"]["message"].endswith(" tokens; lower it")


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages", 400, "invalid_request_error"),
        ("POST", "/v1/messages/count_tokens", 400, "invalid_request_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
def test_each_error_of_messages_has_the_protocol_s_shape(
    server: RealServer, method: str, path: str, status: int, kind: str
) -> None:
    """A05: as its clients read it; the error inside is the one of all routes, its type in the protocol's words."""
    answer = server.http.request(method, path, json=None if method == "GET" else {"model": "m"})
    body = answer.json()
    assert (answer.status_code, body["type"], body["error"]["code"]) == (status, "error", status)
    assert body["error"]["type"] == kind
    assert body["request_id"] == body["error"]["request_id"] == answer.headers["x-request-id"]


def test_a_message_has_its_thinking_its_text_and_its_calls(server: RealServer) -> None:
    answer = message(server).json()
    thinking, text, *calls = answer["content"]
    assert (thinking["type"], thinking["thinking"], text) == (
        "thinking",
        REASONING,
        {"type": "text", "text": "Let me see."},
    )
    assert [(call["type"], call["name"], call["input"]) for call in calls] == [
        ("tool_use", "multiply", ARGUMENTS[0]),
        ("tool_use", "add", ARGUMENTS[1]),
    ]
    assert (answer["type"], answer["role"], answer["stop_reason"]) == ("message", "assistant", "tool_use")
    counted = {"model": "m", "messages": [USER], "tools": MESSAGES_TOOLS}
    usage, count = answer["usage"], server.http.post("/v1/messages/count_tokens", json=counted).json()
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == count["input_tokens"]


def test_the_events_of_a_message_add_up_to_it(server: RealServer) -> None:
    """C03: as the protocol has them; every block begins and ends once, and there is no [DONE]."""
    whole = message(server).json()
    first, *events, end, stop = events_of(message(server, stream=True).text)
    assert (first["type"], first["message"]["content"]) == ("message_start", [])
    # Clients count a prompt by the first event.
    assert first["message"]["usage"]["input_tokens"] == end["usage"]["input_tokens"] > 0
    assert (end["delta"], stop) == ({"stop_reason": "tool_use", "stop_sequence": None}, {"type": "message_stop"})
    assert end["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    blocks: list[dict[str, Any]] = []
    for event in events:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(blocks)
                blocks.append(event["content_block"] | {"written": ""})
            case "content_block_delta":
                (text,) = (value for name, value in event["delta"].items() if name != "type")
                blocks[event["index"]]["written"] += text
            case "content_block_stop":
                assert event["index"] == len(blocks) - 1
    expected = [REASONING, "Let me see.", *(json.dumps(one, ensure_ascii=False) for one in ARGUMENTS)]
    assert [block["written"] for block in blocks] == expected
    assert [block["type"] for block in blocks] == [block["type"] for block in whole["content"]]


def test_a_message_goes_on_with_the_blocks_of_the_one_before(server: RealServer) -> None:
    first = message(server).json()
    results = [
        {"type": "tool_result", "tool_use_id": block["id"], "content": [{"type": "text", "text": "395"}]}
        for block in first["content"]
        if block["type"] == "tool_use"
    ]
    said = [USER, {"role": "assistant", "content": first["content"]}, {"role": "user", "content": results}]
    answer = message(server, messages=said).json()
    assert (answer["content"], answer["stop_reason"]) == ([{"type": "text", "text": ANSWER}], "end_turn")


def test_a_message_ends_at_a_stop_sequence_or_its_bound(server: RealServer) -> None:
    said = [USER, {"role": "assistant", "content": "x"}, USER]
    stopped = message(server, messages=said, stop_sequences=["is"]).json()
    assert (stopped["content"][0]["text"], stopped["stop_reason"], stopped["stop_sequence"]) == (
        "It ",
        "stop_sequence",
        "is",
    )
    assert message(server, max_tokens=5).json()["stop_reason"] == "max_tokens"


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_a_stream_that_breaks_ends_with_an_event_of_the_protocol(play: Any, path: str) -> None:
    """A05: with the words of the error, and nothing that says that it ended in order."""

    async def scene(stage: Any) -> None:
        body = {"model": "embedded", "stream": True, "max_output_tokens": 5, "input": "x"}
        if path == "/v1/messages":
            body = {
                "model": "embedded",
                "stream": True,
                "max_tokens": 5,
                "messages": [{"role": "user", "content": "x"}],
            }
        answer = asyncio.create_task(stage.http.post(path, json=body))
        rid = (await stage.scheduler.receive()).rid
        counts = {"prompt_tokens": 3, "cached_tokens": 0}
        begun = TokenOutput(rid=rid, token_ids=(97,), completion_tokens=1, **counts)
        failed = TokenOutput(
            rid=rid,
            token_ids=(),
            completion_tokens=1,
            finish_reason=FinishReason.ERROR,
            error="the stage broke",
            **counts,
        )
        await stage.scheduler.reply(begun, failed)
        *_, last = events_of((await answer).text)
        assert last["type"] == "error"
        assert "the stage broke" in last["error"]["message"]
        assert last["error"]["type"] == ("api_error" if path == "/v1/messages" else "engine_error")

    play(scene)


def test_numbers_beyond_64_bits_are_shown_as_they_came(server: RealServer) -> None:
    """A tool's schema is in the answer; what a JSON library cannot write must not end the request."""
    schema = {"type": "object", "properties": {"a": {"maximum": 10**30}}}
    answer = server.http.post("/v1/responses", json={"input": "x", "tools": [TOOLS[0] | {"parameters": schema}]})
    assert answer.status_code == 200
    assert str(10**30) in answer.text


def test_what_a_response_repeats_is_bounded(server: RealServer) -> None:
    """Tools that the model does not see are bounded by no context."""
    tool = TOOLS[1] | {"description": "x" * MAX_SHOWN_BYTES}
    refused = server.http.post("/v1/responses", json={"input": "x", "tools": [tool], "tool_choice": "none"})
    assert refused.status_code == 400
    assert f"at most {MAX_SHOWN_BYTES} bytes" in refused.json()["error"]["message"]


def test_items_of_an_answer_are_one_message() -> None:
    """Text after calls is the next message."""
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
    text = {"role": "assistant", "content": "a"}
    fields = ResponseBody.model_validate({"input": [text, call, call | {"call_id": "2"}, text]}).chat_fields
    roles = [(one["role"], one["content"], len(one.get("tool_calls", ()))) for one in fields["messages"]]
    assert roles == [("assistant", "a", 2), ("assistant", "a", 0)]


def test_thoughts_go_back_into_the_prompt_and_a_last_message_of_the_assistant_is_continued() -> None:
    """Thoughts beside text and calls, joined in their order."""
    thoughts = [{"type": "thinking", "thinking": one, "signature": "s"} for one in ("a", "b")]
    said = {"role": "assistant", "content": [thoughts[0], {"type": "text", "text": "c"}, thoughts[1]]}
    user = {"role": "user", "content": "d"}
    for messages, continues in (([user, said], True), ([user, said, user], False)):
        fields = CountTokensBody.model_validate({"model": "m", "messages": messages}).chat_fields
        assert (fields["messages"][1]["content"], fields["messages"][1]["reasoning_content"]) == ("c", "ab")
        assert fields["continue_final_message"] is continues
