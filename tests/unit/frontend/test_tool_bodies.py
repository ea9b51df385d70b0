"""Fields about tools: taken as clients and agents send them, or refused with the place and the remedy."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from engine.frontend.http.routes.tokens import TokenizeBody
from engine.frontend.protocols.openai.bodies import ChatBody
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import parse_body

USER = {"role": "user", "content": "x"}


def tool(name: str = "f", **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **more}}


def call(arguments: str, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}, **more}


def chat(**body: Any) -> ChatBody:
    return parse_body(ChatBody, json.dumps({"messages": [USER]} | body).encode())


def refusal(model: type[BaseModel], **body: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(model, json.dumps({"messages": [USER]} | body).encode())
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("body", "param", "part"),
    [
        ({"tools": [{"type": "function"}]}, "tools.0.function", "tools.0.function must be given"),
        ({"tools": [{"function": {"name": "f"}}]}, "tools.0.type", "tools.0.type must be given"),
        ({"tools": [tool() | {"type": "web_search"}]}, "tools.0.type", "tools.0.type must be 'function', got 'web"),
        ({"tools": [tool(), tool("")]}, "tools.1.function.name", "tools.1.function.name must have >= 1 characters"),
        ({"tools": [tool(parameters=[])]}, "tools.0.function.parameters", "parameters must be an object, got []"),
        ({"tools": [tool(parametres={})]}, "tools.0.function.parametres", "did you mean 'parameters'?"),
        ({"tools": [tool("f"), tool("g"), tool("f")]}, "tools", "tools must have different names, got 'f' twice"),
        ({"tools": [tool()], "tool_choice": "any"}, "tool_choice", "'none', 'auto' or 'required'"),
        (
            {"tools": [tool()], "tool_choice": tool("g")},
            "tool_choice",
            "tool_choice must name one of the tools ('f'), got 'g'",
        ),
        (
            {"tools": [tool()], "tool_choice": {"type": "function"}},
            "tool_choice.function",
            "tool_choice.function must be given",
        ),
        ({"tool_choice": "required"}, "tool_choice", "tool_choice needs tools, but there are none"),
        ({"tool_choice": tool("f")}, "tool_choice", "tool_choice needs tools for the function 'f', but there are none"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls", "must be true or false"),
        (
            {"messages": [USER, {"role": "user"}]},
            "messages.1.content",
            "messages.1: content must be given with role 'user'",
        ),
        (
            {"messages": [USER, {"role": "tool", "content": "x"}]},
            "messages.1.tool_call_id",
            "messages.1: tool_call_id must be given with role 'tool', got null",
        ),
        (
            {"messages": [USER | {"tool_calls": [call("{}")]}]},
            "messages.0.tool_calls",
            "tool_calls must be left out with role 'user'",
        ),
        (
            {"messages": [USER | {"reasoning": "x"}]},
            "messages.0.reasoning",
            "reasoning must be left out with role 'user'",
        ),
        (
            {"messages": [USER, {"role": "assistant", "tool_calls": [{"id": "c1", "function": {"name": "f"}}]}]},
            "messages.1.tool_calls.0.function.arguments",
            "messages.1.tool_calls.0.function.arguments must be given",
        ),
    ],
)
def test_a_bad_body_is_refused_with_its_place(body: dict[str, Any], param: str | None, part: str) -> None:
    """A parameter is honoured or refused by name, in each protocol (C01)."""
    error = refusal(ChatBody, **body)
    assert part in str(error), str(error)
    assert error.body.error.param == param


def test_tools_of_a_text_that_is_no_conversation_are_refused() -> None:
    assert "tools need messages" in str(refusal(TokenizeBody, messages=None, prompt="x", tools=[tool()]))


def test_a_choice_without_tools_that_changes_nothing_is_taken() -> None:
    """vLLM issue 9426: ``tool_choice="none"`` without tools was an error, and clients send it."""
    for choice in ("none", "auto"):
        assert chat(tool_choice=choice).offered_tools == []


def test_tools_are_given_to_the_template_as_models_know_them() -> None:
    """C04: without fields that only engines read, and nothing made up."""
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    body = chat(tools=[tool("f", description="d", parameters=schema, strict=False), tool("g", parameters=None)])
    assert [entry.for_template for entry in body.offered_tools] == [
        tool("f", description="d", parameters=schema),
        tool("g"),
    ]
    assert chat(tools=[tool()], tool_choice="none").offered_tools == []


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ('{"a": {"b": [1]}}', {"a": {"b": [1]}}),
        ("", {}),
        (" \n", {}),
        ('{"a": 1', '{"a": 1'),
        ("[1]", "[1]"),
        ('"text"', '"text"'),
        ("NaN", "NaN"),
        ('{"a": NaN}', '{"a": NaN}'),
        ("[" * 5000, "[" * 5000),
        ('{"path": "C:\\U"}', '{"path": "C:\\U"}'),
    ],
)
def test_arguments_of_earlier_calls_are_an_object_where_they_are_one(arguments: str, given: object) -> None:
    """vLLM issue 19419: empty arguments in the history were an error, and so are those that a model wrote wrong."""
    body = chat(messages=[USER, {"role": "assistant", "content": None, "tool_calls": [call(arguments, index=0)]}])
    assert body.messages[1].for_template == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": given}}],
    }


def test_a_tools_message_and_reasoning_reach_the_template() -> None:
    """C04: engines spell reasoning in two ways. An absent field is no key: templates ask whether there is one."""
    body = chat(
        messages=[
            USER | {"tool_calls": []},
            {"role": "assistant", "content": "y", "reasoning_content": "hm"},
            {"role": "assistant", "content": "y", "reasoning": "hm", "reasoning_content": None},
            {"role": "tool", "content": [{"type": "text", "text": "7"}], "tool_call_id": "c1", "name": "f"},
        ]
    )
    reasoned = {"role": "assistant", "content": "y", "reasoning_content": "hm"}
    assert [message.for_template for message in body.messages] == [
        USER,
        reasoned,
        reasoned,
        {"role": "tool", "content": "7", "tool_call_id": "c1", "name": "f"},
    ]
