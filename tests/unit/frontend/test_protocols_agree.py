"""One conversation, as a body of each chat protocol, becomes the same requests: the protocols differ in words alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
from byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.core.messages import Generate
from engine.frontend.protocols.anthropic import message_order
from engine.frontend.protocols.openai.requests import chat_order
from engine.frontend.protocols.openai.response_shapes import response_order
from engine.frontend.sessions.requests import Order, ServedModel
from engine.frontend.text.dialect import Dialect, Parsing
from engine.frontend.text.tokenizer import ChatTemplate
from engine.frontend.text.tools.families import FAMILIES

DEFAULTS = {"temperature": 0.25, "top_p": 0.5, "top_k": 3}


class WrittenOut:
    """A template that writes out all that it gets."""

    chat_template = "tools"

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> str:
        return json.dumps([conversation, options], ensure_ascii=False, sort_keys=True)


HERMES = FAMILIES["hermes"]
SERVED = ServedModel(
    ByteTokenizer(),
    ChatTemplate(WrittenOut()),
    Limits.of(EngineConfig(), EMBEDDED_FACTS),
    "m",
    Dialect(family=HERMES, form=HERMES.form),
    DEFAULTS,
)


class Call(NamedTuple):
    id: str
    name: str
    arguments: dict[str, Any]
    result: str

    @property
    def written(self) -> str:
        return json.dumps(self.arguments)


class Turn(NamedTuple):
    """An answer of the assistant, the results of its calls, and the user's next texts, unless it is the last one."""

    reasoning: str
    text: str
    calls: list[Call]
    asked: list[str]


class Conversation(NamedTuple):
    system: str | None
    asked: list[str]
    turns: list[Turn]


class Tool(NamedTuple):
    name: str
    description: str | None
    schema: dict[str, Any]
    strict: bool


class Asked(NamedTuple):
    """Everything that all three protocols can say."""

    conversation: Conversation
    tools: list[Tool]
    choice: str | None
    parallel: bool
    thinking: bool | None
    effort: str | None
    schema: dict[str, Any] | None
    stop: list[str]
    sampling: dict[str, float]
    fields: dict[str, Any]


TEXTS = st.text("ab \n\u20ac'", min_size=1, max_size=5)
NAMES = ("add", "find")
CALLS = st.builds(
    Call, st.sampled_from(("c1", "c2")), st.sampled_from(NAMES), st.dictionaries(TEXTS, TEXTS, max_size=2), TEXTS
)
ASKED = st.lists(TEXTS, min_size=1, max_size=2)
TURNS = st.builds(Turn, TEXTS, TEXTS, st.lists(CALLS, max_size=2), ASKED)
BARE_TURNS = st.builds(
    Turn, st.just("") | TEXTS, st.just(""), st.lists(CALLS, min_size=1, max_size=2), st.just([]) | ASKED
)
CONVERSATIONS = st.builds(Conversation, st.none() | TEXTS, ASKED, st.lists(TURNS | BARE_TURNS, max_size=3))
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOLS = st.lists(
    st.builds(Tool, st.sampled_from(NAMES), st.none() | TEXTS, st.sampled_from(({}, SCHEMA)), st.booleans()),
    max_size=2,
    unique_by=lambda tool: tool.name,
)


@st.composite
def everything_asked(draw: st.DrawFn) -> Asked:
    tools = draw(TOOLS)
    choices: list[str | None] = [None, "auto", "none", "required", *(tool.name for tool in tools)] if tools else [None]
    sampling = {"temperature": 0.5, "top_p": 0.75, "top_k": 2}
    return Asked(
        draw(CONVERSATIONS),
        tools,
        draw(st.sampled_from(choices)),
        draw(st.booleans()),
        draw(st.sampled_from((None, True, False))),
        draw(st.sampled_from((None, "low", "high"))),
        None if tools else draw(st.sampled_from((None, SCHEMA))),
        draw(st.lists(TEXTS, max_size=2)),
        {name: sampling[name] for name in draw(st.sets(st.sampled_from([*sampling])))},
        draw(st.sampled_from(({}, {"priority": 2, "cache_salt": "s", "timeout_s": 5.0, "stream": True}))),
    )


# -- chats --


def chat_body(asked: Asked) -> dict[str, Any]:
    choice = asked.choice
    variables = {} if asked.thinking is None else {"enable_thinking": asked.thinking}
    body: dict[str, Any] = {
        "messages": [*_chat_messages(asked.conversation)],
        "tools": [
            {"type": "function", "function": _without_none(_function(tool) | {"parameters": tool.schema})}
            for tool in asked.tools
        ],
        "tool_choice": {"type": "function", "function": {"name": choice}} if choice in NAMES else choice,
        "parallel_tool_calls": asked.parallel,
        "chat_template_kwargs": variables,
        "reasoning_effort": asked.effort,
        "stop": asked.stop,
        "max_completion_tokens": 9,
    }
    if asked.schema is not None:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "output", "schema": asked.schema}}
    return body | asked.sampling | asked.fields


def _function(tool: Tool) -> dict[str, Any]:
    return {"name": tool.name, "description": tool.description, "strict": tool.strict}


def _without_none(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}


def _chat_messages(conversation: Conversation) -> Iterator[dict[str, Any]]:
    if conversation.system is not None:
        yield {"role": "system", "content": conversation.system}
    yield {"role": "user", "content": "\n".join(conversation.asked)}
    for turn in conversation.turns:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
            }
            for call in turn.calls
        ]
        yield _without_none(
            {
                "role": "assistant",
                "content": turn.text or None,
                "reasoning_content": turn.reasoning or None,
                "tool_calls": calls or None,
            }
        )
        for call in turn.calls:
            yield {"role": "tool", "tool_call_id": call.id, "content": call.result}
        if turn.asked:
            yield {"role": "user", "content": "\n".join(turn.asked)}


# -- messages --


def message_body(asked: Asked) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "m",
        "messages": [*_messages(asked.conversation)],
        "system": asked.conversation.system,
        "tools": [_without_none(_function(tool) | {"input_schema": tool.schema}) for tool in asked.tools],
        "max_tokens": 9,
        "stop_sequences": asked.stop,
        "output_config": {} if asked.effort is None else {"effort": asked.effort},
    }
    if asked.thinking is not None:
        body["thinking"] = {"type": "adaptive" if asked.thinking else "disabled"}
    if asked.schema is not None:
        body["output_config"] |= {"format": {"type": "json_schema", "schema": asked.schema}}
    if asked.tools:
        kind = "tool" if asked.choice in NAMES else {None: "auto", "required": "any"}.get(asked.choice, asked.choice)
        named = {"name": asked.choice} if kind == "tool" else {}
        body["tool_choice"] = {"type": kind, "disable_parallel_tool_use": not asked.parallel} | named
    return body | asked.sampling | asked.fields


def _messages(conversation: Conversation) -> Iterator[dict[str, Any]]:
    yield {"role": "user", "content": _texts(conversation.asked)}
    for turn in conversation.turns:
        blocks = [{"type": "thinking", "thinking": turn.reasoning}] if turn.reasoning else []
        blocks += _texts([turn.text]) if turn.text else []
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name, "input": call.arguments} for call in turn.calls
        ]
        yield {"role": "assistant", "content": blocks}
        results = [{"type": "tool_result", "tool_use_id": call.id, "content": call.result} for call in turn.calls]
        if more := results + _texts(turn.asked):
            yield {"role": "user", "content": more}


def _texts(texts: list[str]) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


# -- responses --


def response_body(asked: Asked) -> dict[str, Any]:
    choice = asked.choice
    body: dict[str, Any] = {
        "input": [*_items(asked.conversation)],
        "instructions": asked.conversation.system,
        "tools": [
            {"type": "function"} | _without_none(_function(tool) | {"parameters": tool.schema}) for tool in asked.tools
        ],
        "tool_choice": {"type": "function", "name": choice} if choice in NAMES else choice,
        "parallel_tool_calls": asked.parallel,
        "chat_template_kwargs": {} if asked.thinking is None else {"enable_thinking": asked.thinking},
        "reasoning": {"effort": asked.effort},
        "stop": asked.stop,
        "max_output_tokens": 9,
    }
    if asked.schema is not None:
        body["text"] = {"format": {"type": "json_schema", "name": "output", "schema": asked.schema}}
    return body | asked.sampling | asked.fields


def _items(conversation: Conversation) -> Iterator[dict[str, Any]]:
    yield {"role": "user", "content": [{"type": "input_text", "text": text} for text in conversation.asked]}
    for turn in conversation.turns:
        if turn.reasoning:
            of_summary = [{"type": "summary_text", "text": turn.reasoning}]
            of_content = [{"type": "reasoning_text", "text": turn.reasoning}]
            is_summary = bool(len(turn.reasoning) % 2)
            yield {"type": "reasoning"} | ({"summary": of_summary} if is_summary else {"content": of_content})
        if turn.text:
            yield {"role": "assistant", "content": [{"type": "output_text", "text": turn.text}]}
        for call in turn.calls:
            yield {"type": "function_call", "call_id": call.id, "name": call.name, "arguments": call.written}
        for call in turn.calls:
            yield {"type": "function_call_output", "call_id": call.id, "output": call.result}
        if turn.asked:
            yield {"role": "user", "content": "\n".join(turn.asked)}


def requests_of(order: Order) -> tuple[str, Generate, Parsing | None, bool]:
    """The prompt as text, the request without its id, and how its output is parsed."""
    (message,) = order.messages
    prompt = bytes(message.prompt_ids).decode()
    return prompt, msgspec.structs.replace(message, rid="", prompt_ids=()), order.parsing, order.stream


@given(everything_asked())
def test_a_conversation_is_the_same_in_all_protocols(asked: Asked) -> None:
    """C01: what a client can say in several protocols means the same in each."""
    if asked.conversation.turns and not (asked.conversation.turns[-1].calls or asked.conversation.turns[-1].asked):
        return  # Only messages continue a last answer.
    due = requests_of(chat_order(json.dumps(chat_body(asked)).encode(), SERVED))
    assert requests_of(message_order(json.dumps(message_body(asked)).encode(), SERVED)) == due
    response = response_order(json.dumps(response_body(asked)).encode(), SERVED)
    assert requests_of(response) == due
    assert_repeats(response, asked)


def assert_repeats(response: Order, asked: Asked) -> None:
    """A response repeats what its request comes to: what the client sent, and the model's own defaults for the rest."""
    shown, (message,) = json.loads(response.shown_request), response.messages
    assert (shown["temperature"], shown["top_p"]) == (message.sampling.temperature, message.sampling.top_p)
    assert (shown["instructions"], shown["max_output_tokens"]) == (asked.conversation.system, 9)
    assert (shown["parallel_tool_calls"], shown["reasoning"]["effort"]) == (asked.parallel, asked.effort)
    named = {"type": "function", "name": asked.choice}
    assert shown["tool_choice"] == (named if asked.choice in NAMES else asked.choice or "auto")
    assert [tool["name"] for tool in shown["tools"]] == [tool.name for tool in asked.tools]


@given(CONVERSATIONS, TEXTS)
def test_a_last_answer_is_continued_by_messages_and_on_request_by_chats(conversation: Conversation, begun: str) -> None:
    asked = Asked(conversation, [], None, True, None, None, None, [], {}, {})
    chat, message = chat_body(asked), message_body(asked)
    chat["messages"].append({"role": "assistant", "content": begun})
    chat["continue_final_message"] = True
    message["messages"].append({"role": "assistant", "content": begun})
    due = requests_of(chat_order(json.dumps(chat).encode(), SERVED))
    assert requests_of(message_order(json.dumps(message).encode(), SERVED)) == due
