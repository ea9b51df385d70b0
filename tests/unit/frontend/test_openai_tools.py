"""Calls of tools and reasoning through the official client, unmodified, on a real server whose model recites a text."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from real_servers import RealServer, running
from reciting_model import write_reciting_model

from engine.server.launch.preload import PreloadedParent

AGENT = Path(__file__).parents[3] / "examples/agent/agent.py"
CALLS = (
    "<think>\nTwo products, then a sum. Not <tool_call> yet.\n</think>\n\nLet me see.\n"
    '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>\n'
    '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 3, "why": "\u20ac \U0001f98a"}}\n</tool_call>'
)
FIRST = {"a": 17, "b": 23}
SECOND = {"a": 1, "b": 3, "why": "\u20ac \U0001f98a"}
ANSWER = "It is 395."
QUESTION = [{"role": "user", "content": "17 * 23 + 1 + 3?"}]
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "multiply", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "add", "description": "a sum", "parameters": {}}},
]


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


def ask(client: openai.OpenAI, **more: Any) -> Any:
    asked = {"model": "m", "messages": QUESTION, "tools": TOOLS, "temperature": 0} | more
    return client.chat.completions.create(**asked)


def test_the_parsers_are_those_of_the_template(server: RealServer) -> None:
    """Operators see and do what the routes promise (C06)."""
    info = server.http.get("/model_info").json()
    assert (info["tool_call_parser"], info["reasoning_parser"]) == ("hermes", "qwen3")


def test_an_answer_in_one(client: openai.OpenAI) -> None:
    """C01, C03: reasoning, content and two calls, each with an id of its own."""
    answer = ask(client)
    (choice,) = answer.choices
    message = choice.message
    assert choice.finish_reason == "tool_calls"
    assert message.content == "Let me see."
    assert message.reasoning_content == "Two products, then a sum. Not <tool_call> yet."
    first, second = message.tool_calls
    assert (first.type, first.function.name, json.loads(first.function.arguments)) == ("function", "multiply", FIRST)
    assert (second.function.name, json.loads(second.function.arguments)) == ("add", SECOND)
    assert first.id != second.id
    reasoning = answer.usage.completion_tokens_details.reasoning_tokens
    assert 0 < reasoning < answer.usage.completion_tokens


def test_a_stream_adds_up_to_the_answer_in_one(client: openai.OpenAI) -> None:
    """C03: the client's own accumulator comes to the same message, ids apart."""
    whole = ask(client)
    options = {"include_usage": True}
    with client.chat.completions.stream(
        model="m", messages=QUESTION, tools=TOOLS, temperature=0, stream_options=options
    ) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    (one,), (other,) = whole.choices, final.choices
    assert other.finish_reason == one.finish_reason
    assert other.message.content == one.message.content
    assert other.message.reasoning_content == one.message.reasoning_content
    said = [[(call.function.name, call.function.arguments) for call in c.message.tool_calls] for c in (one, other)]
    assert said[0] == said[1]
    assert final.usage.completion_tokens_details == whole.usage.completion_tokens_details
    done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.index, event.name) for event in done] == [(0, "multiply"), (1, "add")]


def test_deltas_name_a_call_once_and_count_it(client: openai.OpenAI) -> None:
    """Id, type and name once for each call, arguments in pieces, and an index that counts.

    vLLM issue 18412: streamed calls had no ids. SGLang issue 6310 and vLLM pull request 38158: all calls had index 0,
    or that of the tool among those of the request.
    """
    with ask(client, stream=True) as stream:
        chunks = list(stream)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or []]
    named = [delta for delta in deltas if delta.function.name is not None]
    assert [(delta.index, delta.function.name, delta.type) for delta in named] == [
        (0, "multiply", "function"),
        (1, "add", "function"),
    ]
    assert [delta.id for delta in deltas if delta.id is not None] == [delta.id for delta in named]
    assert [delta.index for delta in deltas] == sorted(delta.index for delta in deltas)
    for index, expected in enumerate((FIRST, SECOND)):
        pieces = [delta.function.arguments for delta in deltas if delta.index == index]
        assert len(pieces) > 3
        assert json.loads("".join(pieces)) == expected
    reasons = [chunk.choices[0].finish_reason for chunk in chunks]
    assert reasons == [None] * (len(chunks) - 1) + ["tool_calls"]


def test_choices_have_parsers_of_their_own(client: openai.OpenAI) -> None:
    """vLLM pull request 38158: with n > 1 the choices shared a parser, and calls came out mixed or not at all."""
    whole = ask(client, n=3)
    with ask(client, n=3, stream=True) as stream:
        arguments: dict[tuple[int, int], str] = {}
        for chunk in stream:
            for choice in chunk.choices:
                for call in choice.delta.tool_calls or []:
                    key = (choice.index, call.index)
                    arguments[key] = arguments.get(key, "") + call.function.arguments
    assert sorted(arguments) == [(choice, call) for choice in range(3) for call in range(2)]
    for choice in whole.choices:
        calls = choice.message.tool_calls
        assert [arguments[choice.index, number] for number in range(2)] == [call.function.arguments for call in calls]
    assert len({call.id for choice in whole.choices for call in choice.message.tool_calls}) == 6


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_in_the_middle_of_a_call_is_told(client: openai.OpenAI, stream: bool) -> None:
    """vLLM issue 53269: streamed, a call that the length limit cut ended with ``tool_calls``."""
    full = ask(client).usage.completion_tokens
    answer = ask(client, stream=stream, max_tokens=full - 4)
    if stream:
        with answer as chunks:
            reason = [chunk.choices[0].finish_reason for chunk in chunks][-1]
    else:
        (choice,) = answer.choices
        reason = choice.finish_reason
        first, second = choice.message.tool_calls
        assert json.loads(first.function.arguments) == FIRST
        assert second.function.arguments.startswith('{"a": 1')
        assert not second.function.arguments.endswith("}")
    assert reason == "length"


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_in_the_middle_of_a_call(client: openai.OpenAI, stream: bool) -> None:
    """vLLM pull request 34101: with stop strings streamed calls were mangled. A cut call is no reason to answer it."""
    answer = ask(client, stream=stream, stop=['"why"'])
    if stream:
        with answer as chunks:
            seen = list(chunks)
        reason = seen[-1].choices[0].finish_reason
        calls = [call for chunk in seen for call in chunk.choices[0].delta.tool_calls or []]
        second = "".join(call.function.arguments for call in calls if call.index == 1)
    else:
        reason = answer.choices[0].finish_reason
        second = answer.choices[0].message.tool_calls[1].function.arguments
    assert (reason, second) == ("stop", '{"a": 1, "b": 3, ')


def test_one_call_for_a_client_that_wants_one(client: openai.OpenAI) -> None:
    """vLLM issue 9451 and SGLang issue 9696"""
    (choice,) = ask(client, parallel_tool_calls=False).choices
    assert [call.function.name for call in choice.message.tool_calls] == ["multiply"]
    assert choice.finish_reason == "tool_calls"


def test_without_a_choice_of_tools_the_text_is_content(client: openai.OpenAI) -> None:
    """vLLM issue 55080: with ``none``, text that looked like a call was deleted."""
    for change in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}):
        (choice,) = ask(client, **change).choices
        assert choice.message.tool_calls is None
        assert choice.finish_reason == "stop"
        assert choice.message.content == CALLS.partition("</think>\n\n")[2]


def test_the_model_is_not_told_of_tools_that_it_may_not_call(client: openai.OpenAI) -> None:
    """The chat template is the tokenizer's (C04)."""
    told, untold, none = (
        ask(client, **change).usage.prompt_tokens
        for change in ({}, {"tool_choice": "none"}, {"tools": openai.NOT_GIVEN})
    )
    assert none == untold < told


def test_tokenize_shows_what_the_model_is_told(client: openai.OpenAI, server: RealServer) -> None:
    """C01: the ids that generation itself counts, tools included."""
    body = {"messages": QUESTION, "tools": TOOLS}
    counted = server.http.post("/tokenize", json=body).raise_for_status().json()["count"]
    assert counted == ask(client, max_tokens=1).usage.prompt_tokens


def test_logprobs_come_with_calls(client: openai.OpenAI) -> None:
    """C02: one entry for each token, regardless of the part that its text went into."""
    (choice,) = ask(client, logprobs=True).choices
    with ask(client, logprobs=True, stream=True) as stream:
        pieces = [chunk.choices[0].logprobs for chunk in stream]
    entries = [entry.token for piece in pieces if piece for entry in piece.content]
    assert entries == [entry.token for entry in choice.logprobs.content]


def test_an_answer_to_a_call_is_taken_and_rendered(client: openai.OpenAI) -> None:
    """C01, C04: the message goes back as it came, with null content and reasoning, and the tools' messages follow."""
    message = ask(client).choices[0].message
    results = [{"role": "tool", "tool_call_id": call.id, "content": "391"} for call in message.tool_calls]
    (choice,) = ask(client, messages=[*QUESTION, message, *results]).choices
    assert (choice.message.content, choice.finish_reason) == ("It is 395.", "stop")
    bare = message.model_dump() | {"content": None}
    assert ask(client, messages=[*QUESTION, bare, *results]).choices[0].message.content == "It is 395."


@pytest.fixture
def agent() -> Any:
    spec = importlib.util.spec_from_file_location("agent_example", AGENT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_turn_of_the_agent_of_the_examples_is_bounded(agent: Any) -> None:
    """A model that never ends its turn, such as the embedded one, does not fill its context."""
    given: dict[str, Any] = {}

    def create(**fields: Any) -> Any:
        given.update(fields)
        return SimpleNamespace(choices=[SimpleNamespace(message=SimpleNamespace(tool_calls=None, content="395"))])

    client = SimpleNamespace(chat=SimpleNamespace(completions=SimpleNamespace(create=create)))
    assert agent.answer(client, "m", "What is 17 times 23, plus 4?") == "395"
    assert given["max_completion_tokens"] == agent.MOST_TOKENS


def test_the_agent_of_the_examples_calls_and_answers(agent: Any, client: openai.OpenAI) -> None:
    """The loop of examples/agent, with the calls and the answer that the model recites."""
    called: list[tuple[str, dict[str, Any]]] = []
    functions = {
        "multiply": lambda **given: called.append(("multiply", given)) or given["a"] * given["b"],
        "add": lambda **given: called.append(("add", given)) or given["a"] + given["b"],
    }
    assert agent.answer(client, "m", QUESTION[0]["content"], functions) == "It is 395."
    assert called == [("multiply", FIRST), ("add", SECOND)]
