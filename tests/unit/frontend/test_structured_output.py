"""Structured output by the official OpenAI client and ``/generate``, on a real server of the embedded model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from real_servers import RealServer

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def client(server: RealServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=60) as made:
        yield made


def check_person(text: str) -> None:
    value = json.loads(text)
    assert {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert isinstance(value["age"], int)
    assert 0 <= value["age"] <= 150
    assert set(value.get("tags", ())) <= {"a", "b"}


def test_a_schema_whole_and_streamed(client: openai.OpenAI) -> None:
    """C01, C04: greedy, so both say the same; every output parses."""
    asked: dict[str, Any] = {"model": "embedded", "messages": HELLO, "temperature": 0, "response_format": FORMAT}
    (choice,) = client.chat.completions.create(**asked).choices
    assert choice.finish_reason == "stop"
    check_person(choice.message.content or "")
    stream = client.chat.completions.create(stream=True, **asked)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == choice.message.content


def test_every_choice_follows_it(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="embedded",
        messages=HELLO,
        temperature=1.0,
        seed=3,
        n=6,
        response_format=FORMAT,  # type: ignore[arg-type]
    )
    texts = [choice.message.content or "" for choice in answer.choices]
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 6
    assert len(set(texts)) > 1
    for text in texts:
        check_person(text)


@pytest.mark.parametrize(
    ("extra", "pattern"),
    [
        ({"guided_regex": "[a-c]{3}-[0-9]+x"}, "[a-c]{3}-[0-9]+x"),
        ({"guided_choice": ["yes", "no \u00e9"]}, "yes|no \u00e9"),
        ({"guided_grammar": 'root ::= "a" num\nnum ::= [0-9]'}, "a[0-9]"),
        ({"guided_json": {"enum": [1, "two"]}}, '1|"two"'),
        ({"structured_outputs": {"regex": "b{2}"}}, "bb"),
        ({"structured_outputs": {"choice": ["one"]}}, "one"),
        ({"structured_outputs": {"json": '{"const": null}'}}, "null"),
        ({"structured_outputs": {"grammar": 'start: "x" "y"?'}}, "xy?"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_the_fields_of_the_field(client: openai.OpenAI, extra: dict[str, Any], pattern: str) -> None:
    """C01: as vLLM spells them, older and newer."""
    answer = client.completions.create(
        model="embedded", prompt="say", max_tokens=400, temperature=1.0, seed=1, extra_body=extra
    )
    (choice,) = answer.choices
    assert choice.finish_reason == "stop"
    assert re.fullmatch(pattern, choice.text)


def test_logprobs_are_of_what_is_allowed(client: openai.OpenAI) -> None:
    """Forbidden tokens have no probability: the logprob of the first of two letters is relative to both."""
    (choice,) = client.completions.create(
        model="embedded", prompt="say", max_tokens=4, temperature=0, logprobs=5, extra_body={"guided_regex": "[ab]c"}
    ).choices
    assert choice.logprobs is not None
    first, second, end = choice.logprobs.top_logprobs or ()
    assert set(first) == {"a", "b"}
    assert second == {"c": pytest.approx(0.0)}
    assert list(end.values()) == [pytest.approx(0.0)]


@pytest.mark.parametrize(
    ("extra", "param", "message"),
    [
        ({"guided_regex": "(a"}, "guided_regex", "unclosed group"),
        ({"guided_json": {"properties": {"a": {"type": "x"}}}}, "guided_json", "/properties/a"),
        ({"structured_outputs": {"json": {"type": "x"}}}, "structured_outputs.json", "Invalid type: x"),
        ({"structured_outputs": {}}, "structured_outputs", "must hold one of"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, None, "at most one field"),
        ({"guided_choice": []}, "guided_choice", "guided_choice"),
        ({"response_format": {"type": "yaml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, None, "json_schema"),
    ],
)
def test_what_cannot_be_followed_is_refused(
    client: openai.OpenAI, extra: dict[str, Any], param: str | None, message: str
) -> None:
    """C02: a 400 that names the field and the place."""
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="embedded", prompt="say", extra_body=extra)
    assert message in str(caught.value)
    assert param is None or caught.value.param == param


def test_the_native_fields_and_the_metrics(server: RealServer) -> None:
    """C01: as SGLang spells them; a grammar is compiled once."""
    for _ in range(2):
        body = {"text": "say", "sampling_params": {"regex": "q{3}", "max_new_tokens": 9, "temperature": 0}}
        answer = httpx.post(f"{server.url}/generate", json=body, timeout=60).json()
        assert answer["text"] == "qqq"
        assert answer["meta_info"]["finish_reason"] == "stop"
    refused = httpx.post(f"{server.url}/generate", json={"text": "a", "sampling_params": {"ebnf": "root ::= x"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "sampling_params.ebnf"
    metrics = httpx.get(f"{server.url}/metrics", timeout=20).text
    assert re.search(r"engine_grammar_hits_total\{[^}]*\} [1-9]", metrics)
    assert re.search(r"engine_grammars_compiled_total\{[^}]*\} [1-9]", metrics)
    assert re.search(r"engine_grammar_check_seconds_count\{[^}]*\} [1-9]", metrics)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/completions", {"prompt": "say", "n": 2, "max_tokens": 20}, "guided_grammar"),
        ("/v1/chat/completions", {"messages": HELLO}, "structured_outputs.grammar"),
        ("/generate", {"text": "say"}, "sampling_params.ebnf"),
    ],
)
def test_what_shows_only_in_the_output_is_the_requests_fault_too(
    server: RealServer, path: str, body: dict[str, Any], field: str
) -> None:
    """A05, C02: with the tokens before it in a stream, and no 500."""
    outer, _, inner = field.rpartition(".")
    grammar = {inner: "start: /[a-d]{6}/ MORE\nMORE: /x/ & /y/"}
    asked = body | ({outer: grammar} if outer else grammar)
    whole = httpx.post(f"{server.url}{path}", json=asked, timeout=60)
    assert whole.status_code == 400
    with httpx.stream("POST", f"{server.url}{path}", json=asked | {"stream": True}, timeout=60) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert (response.status_code, "[DONE]" in events) == (200, False)
    assert len(events) > 1
    for error in (whole.json()["error"], json.loads(events[-1])["error"]):
        assert (error["code"], error["type"], error["param"]) == (400, "invalid_request_error", field)
        assert "cannot be followed after 6 tokens of output: nothing may come there" in error["message"]
