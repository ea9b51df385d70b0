"""Calls that are required, on a real server of the embedded model, whose weights are random: each is whole."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from real_servers import RealServer

SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 8},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def client(server: RealServer):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def ask(client: openai.OpenAI, **more: Any) -> Any:
    asked = {"model": "embedded", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "max_tokens": 400}
    return client.chat.completions.create(
        **(asked | {"parallel_tool_calls": False, "temperature": 1, "seed": 3} | more)
    )


def test_a_required_call_is_one_of_the_tools_with_arguments_of_its_schema(client: openai.OpenAI) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01).

    The chat template is the tokenizer's (C04).
    """
    for choice in ask(client, tool_choice="required", n=4).choices:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        (call,) = choice.message.tool_calls
        schema = SCHEMA if call.function.name == "weather" else {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), schema)


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_function_is_called(client: openai.OpenAI, stream: bool) -> None:
    """vLLM pull request 25054: the protocol ends such an answer with ``stop``, streamed or not."""
    answer = ask(client, tool_choice=NAMED, stream=stream)
    if stream:
        with answer as chunks:
            seen = [chunk.choices[0] for chunk in chunks]
        calls = [call for choice in seen for call in choice.delta.tool_calls or []]
        name, given = calls[0].function.name, "".join(call.function.arguments for call in calls)
        reason = seen[-1].finish_reason
    else:
        (call,) = answer.choices[0].message.tool_calls
        name, given, reason = call.function.name, call.function.arguments, answer.choices[0].finish_reason
    assert (name, reason) == ("weather", "stop")
    jsonschema.validate(json.loads(given), SCHEMA)


def test_a_call_that_the_limit_cuts_is_told(client: openai.OpenAI) -> None:
    (choice,) = ask(client, tool_choice=NAMED, max_tokens=60).choices
    assert choice.finish_reason == "length"
    (call,) = choice.message.tool_calls
    assert not call.function.arguments.endswith("}")


def test_strict_tools_leave_the_choice_to_the_model(client: openai.OpenAI) -> None:
    """The embedded model never writes the marker by chance, so all of its text is content."""
    strict = [TOOLS[0] | {"function": TOOLS[0]["function"] | {"strict": True}}]
    (choice,) = ask(client, tools=strict, max_tokens=12).choices
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content


def test_an_answer_keeps_to_its_schema_beside_tools(client: openai.OpenAI) -> None:
    """C04: the model decides whether it calls or answers, and both are what was asked for."""
    schema = {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]}
    shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema | {"additionalProperties": False}}}
    for choice in ask(client, response_format=shape, n=4).choices:
        if choice.message.tool_calls:
            assert choice.finish_reason in ("tool_calls", "length")
        else:
            assert isinstance(json.loads(choice.message.content)["on"], bool)


@pytest.mark.parametrize(
    ("change", "param", "part"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format", "cannot both restrict the output"),
        (
            {"tool_choice": "auto", "extra_body": {"guided_grammar": 'start: "a"'}},
            "guided_grammar",
            "must be distinguishable from the beginning of an output",
        ),
        (
            {"tools": [TOOLS[1], {"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "tools.1.function.parameters",
            "tools.1.function.parameters.type must be 'object', because arguments have names, got 'array'",
        ),
        (
            {
                "tools": [
                    TOOLS[1],
                    {
                        "type": "function",
                        "function": {"name": "f", "parameters": {"properties": {"x": {"type": "strange"}}}},
                    },
                ]
            },
            "tools.1.function.parameters",
            "at /properties/x",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused_with_its_place(
    client: openai.OpenAI, change: dict[str, Any], param: str, part: str
) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01)."""
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, **({"tool_choice": "required"} | change))
    assert caught.value.body["param"] == param
    assert part in str(caught.value)
