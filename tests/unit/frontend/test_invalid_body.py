"""Errors about bodies that are wrong on purpose: short, cheap, and in the words of the client."""

from __future__ import annotations

import difflib
import json
import math
import re
from typing import Any

import pytest
from openai.types import completion_create_params as text_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import BaseModel

from engine.frontend.http.routes.tokens import TokenizeBody
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody
from engine.frontend.protocols.openai.requests import Translation
from engine.frontend.schema.errors import MAX_MESSAGE_CHARS, MAX_PARAM_CHARS, ApiError, public
from engine.frontend.schema.invalid_body import MAX_DESCRIBED_ERRORS, MAX_SHOWN_ERRORS
from engine.frontend.schema.native import GenerateBody, parse_body
from engine.frontend.schema.operator_routes import AbortBody

MANY = 100_000


def refusal(model: type[BaseModel], body: bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_body(model, body)
    assert caught.value.status == 400
    return caught.value


def unknown(count: int) -> bytes:
    return b"{" + b",".join(b'"k%d":1' % number for number in range(count)) + b"}"


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (GenerateBody, b'{"input_ids": [' + b'"",' * MANY + b"1]}"),
        (CompletionBody, b'{"prompt": [' + b'"",1,' * MANY + b"1]}"),
        (CompletionBody, b'{"prompt": [[' + b'"",' * MANY + b"1]]}"),
        (ChatBody, b'{"messages": [' + b'{"a": 1},' * 4000 + b"1]}"),
        (ChatBody, b'{"messages": [{"role": "user", "content": [' + b"1," * 4000 + b"1]}]}"),
        (GenerateBody, unknown(MANY)),
        (GenerateBody, unknown(MAX_DESCRIBED_ERRORS - 1)),
        (GenerateBody, b'{"sampling_params": ' + unknown(MANY) + b"}"),
        (GenerateBody, b'{"' + b"k" * MANY + b'": 1}'),
        (GenerateBody, b'{"text": "x", "rid": "' + b"r" * MANY + b'"}'),
        (GenerateBody, b'{"text": {"' + b"k" * MANY + b'": [[[]]]}}'),
        (GenerateBody, b'{"text": ' + b"[" * MANY),
        (GenerateBody, b'{"text": "x", "priority": ' + b"1" * MANY + b"}"),
    ],
    ids=range(13),
)
def test_the_answer_to_a_huge_wrong_body_is_short(model: type[BaseModel], body: bytes) -> None:
    """C01: the answers were as large as the bodies, and larger."""
    error = refusal(model, body).body.error
    assert len(error.message) < 3000
    assert len(error.param or "") < MAX_PARAM_CHARS + 20


def test_only_the_first_errors_are_told_and_the_rest_are_counted() -> None:
    message = str(refusal(GenerateBody, unknown(20)))
    assert message.count("is not a field here") == MAX_SHOWN_ERRORS
    # Without text and input_ids the rule between fields is not asked: a field is wrong already.
    assert message.endswith(f"and {20 - MAX_SHOWN_ERRORS} more")


USER = [{"role": "user", "content": "x"}]
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("model", "body", "param"),
    [
        *[
            (model, base | fields, param)
            for model, base in ((CompletionBody, {"prompt": "x"}), (ChatBody, {"messages": USER}))
            for fields, param in (
                ({"stream_options": {}}, "stream_options"),
                ({"stop": ["x"] * 17}, "stop"),
                ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
                ({"min_tokens": 3, "max_tokens": 2}, "min_tokens"),
                ({"structured_outputs": {}}, "structured_outputs"),
                ({"guided_regex": "a", "guided_grammar": "b"}, None),
                ({"logit_bias": {"x": 1}}, "logit_bias.x"),
            )
        ],
        (CompletionBody, {"prompt": []}, "prompt"),
        (CompletionBody, {"prompt": ["x"] * 2, "n": 100}, "n"),
        (ChatBody, {"messages": [{"role": "user"}]}, "messages.0.content"),
        (ChatBody, {"messages": [*USER, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
        (ChatBody, {"messages": [USER[0] | {"reasoning": "x"}]}, "messages.0.reasoning"),
        (ChatBody, {"messages": USER, "max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        (ChatBody, {"messages": USER, "top_logprobs": 2}, "top_logprobs"),
        (ChatBody, {"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        (ChatBody, {"messages": USER, "tools": [TOOL, TOOL]}, "tools"),
        (ChatBody, {"messages": USER, "tool_choice": "required"}, "tool_choice"),
        (TokenizeBody, {"prompt": "x", "tools": [TOOL]}, "tools"),
        (TokenizeBody, {"messages": USER, "chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs"),
        (TokenizeBody, {}, None),
        (GenerateBody, {"text": "x", "sampling_params": {"stop": ["x"] * 17}}, "sampling_params.stop"),
        (
            GenerateBody,
            {"text": "x", "sampling_params": {"min_new_tokens": 3, "max_new_tokens": 2}},
            "sampling_params.min_new_tokens",
        ),
        (GenerateBody, {"text": "x", "sampling_params": {"regex": "a", "ebnf": "b"}}, "sampling_params"),
        (GenerateBody, {"text": "x", "top_logprobs_num": 1}, "top_logprobs_num"),
        (GenerateBody, {"text": "x", "logprob_start_len": 0}, "logprob_start_len"),
        (GenerateBody, {"text": "x", "input_ids": [1]}, None),
        (AbortBody, {}, None),
    ],
)
def test_a_rule_between_fields_names_the_one_at_fault(
    model: type[BaseModel], body: dict[str, object], param: str | None
) -> None:
    """C02: and the body that it stands in, or none where two are at fault alike."""
    error = refusal(model, json.dumps(body).encode()).body.error
    assert error.param == param
    assert param is None or param.rpartition(".")[2] in error.message


def test_names_are_compared_for_what_is_shown_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 400,000 unknown keys was compared with every field."""
    compared: list[str] = []

    def note(name: str, *_: object, **__: object) -> list[str]:
        compared.append(name)
        return []

    monkeypatch.setattr(difflib, "get_close_matches", note)
    refusal(GenerateBody, unknown(MAX_DESCRIBED_ERRORS))
    assert len(compared) == MAX_SHOWN_ERRORS
    refusal(GenerateBody, b'{"' + b"k" * (65) + b'": 1}')
    assert len(compared) == MAX_SHOWN_ERRORS


@pytest.mark.parametrize(
    ("model", "body", "param", "parts"),
    [
        (GenerateBody, '{"text": "x", "max-tokens": 5}', "max-tokens", ["max-tokens is not a field here, got 5"]),
        (GenerateBody, '{"text": "x", "str": 5}', "str", ["str is not a field here"]),
        (GenerateBody, '{"text": "x", "": 5}', None, ["is not a field here"]),
        (
            GenerateBody,
            '{"text": "x", "sampling_params": {"max-tokens": 5}}',
            "sampling_params.max-tokens",
            ["sampling_params.max-tokens is not", "max_new_tokens"],
        ),
        (
            ChatBody,
            '{"messages": [{"role": "user", "content": "x", "contant": "x"}]}',
            "messages.0.contant",
            ["did you mean 'content'"],
        ),
        (
            ChatBody,
            '{"messages": [{"role": "user", "content": "x", "zzz": "x"}]}',
            "messages.0.zzz",
            ["the fields are role, content"],
        ),
        (
            ChatBody,
            '{"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "int": 1}]}]}',
            "messages.0.content.0.int",
            ["messages.0.content.0.int is not a field here, got 1; the fields are type, text"],
        ),
        (
            ChatBody,
            '{"messages": [{"role": "user", "content": "x"}], "stream_options": {"include-usage": true}}',
            "stream_options.include-usage",
            ["did you mean 'include_usage'"],
        ),
        (CompletionBody, '{"prompt": [[1, "x"]]}', "prompt.0.1", ["prompt.0.1 must be an integer, got 'x'"]),
        (
            CompletionBody,
            '{"prompt": "x", "structured_outputs": {"json": 3}}',
            "structured_outputs.json",
            ["structured_outputs.json must be an object, true or false or a string, got 3"],
        ),
        (
            CompletionBody,
            '{"prompt": "x", "structured_outputs": {"jsom": 3}}',
            "structured_outputs.jsom",
            ["did you mean 'json'?"],
        ),
        (
            CompletionBody,
            '{"prompt": "x", "guided_json": "' + "[" * 5000 + '"}',
            "guided_json",
            ["guided_json must be JSON: recursion limit exceeded"],
        ),
        (
            GenerateBody,
            '{"text": "x", "sampling_params": {"json_schema": "{"}}',
            "sampling_params.json_schema",
            ["sampling_params.json_schema must be JSON: EOF while parsing an object"],
        ),
    ],
)
def test_an_error_names_the_key_as_it_was_written_and_the_fields_that_stand_there(
    model: type[BaseModel], body: str, param: str | None, parts: list[str]
) -> None:
    """C01: a key with a dash lost its name, and nested fields were compared with those of the whole body."""
    error = refusal(model, body.encode())
    assert error.body.error.param == param
    assert all(part in str(error) for part in parts), str(error)


def test_no_error_is_long() -> None:
    """The bound of last resort, for every error that quotes a client's input."""
    error = ApiError.invalid("x" * MANY, param="y" * MANY).body.error
    assert len(error.message) < MAX_MESSAGE_CHARS + 40
    assert len(error.param or "") < MAX_PARAM_CHARS + 40


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("stage 1: division by zero", "stage 1: division by zero"),
        (
            "the stage-1 process died: it was killed by signal 9 (SIGKILL)",
            "the stage-1 process died: it was killed by signal 9 (SIGKILL)",
        ),
        (
            'the scheduler process died: Traceback (most recent call last):\n  File "/srv/secret/x.py"\nKeyError: 5',
            "the scheduler process died; the server's log says why",
        ),
        (
            "the scheduler process died: engine.core.errors.X: /srv/secret",
            "the scheduler process died; the server's log says why",
        ),
        (
            "the stage-1 process died: on node-7: it was killed by signal 9 (SIGKILL)",
            "the stage-1 process died: on node-7: it was killed by signal 9 (SIGKILL)",
        ),
        (
            "the stage-1 process died: on node-7: its connection was closed: its agent was ended",
            "the stage-1 process died: on node-7: its connection was closed: its agent was ended",
        ),
        (
            "the stage-1 process died: on node-7: Traceback (most recent call last):\n  File x",
            "the stage-1 process died: on node-7; the server's log says why",
        ),
        ("it failed: Traceback (most recent call last):\n  File x", "it failed; the server's log says why"),
        ("stage 0 failed: OSError: cannot read /srv/secret/w.bin\nmore", "stage 0 failed: OSError: cannot read w.bin"),
        ("ask http://127.0.0.1:30000/docs/it or /v1/models", "ask http://127.0.0.1:30000/docs/it or models"),
    ],
)
def test_a_client_reads_one_sentence(text: str, told: str) -> None:
    """A06: tracebacks and folders of the server were sent to clients."""
    assert public(text) == told


IMAGE = {"type": "image_url", "image_url": {"url": "data:,"}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {}}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}, IMAGE]}]},
            "messages.0.content.1.type",
            "messages.0.content.1.type must be 'text', got 'image_url'",
        ),
        (
            {"messages": [{"role": "user", "content": "x"}], "tool_choice": ALLOWED},
            "tool_choice.type",
            "tool_choice.type must be 'function', got 'allowed_tools'",
        ),
        (
            {"messages": [{"role": "user", "content": 1}]},
            "messages.0.content",
            "messages.0.content must be a string or a list, got 1",
        ),
    ],
)
def test_of_a_union_only_the_branch_that_was_meant_is_told(body: dict[str, object], param: str, says: str) -> None:
    """C01: the error for a list of parts with one wrong part said that the list is no string."""
    error = refusal(ChatBody, json.dumps(body).encode()).body.error
    assert error.param == param
    assert error.message.startswith(says)


@pytest.mark.parametrize(
    ("params", "body"),
    [(chat_params.CompletionCreateParamsBase, ChatBody), (text_params.CompletionCreateParamsBase, CompletionBody)],
)
def test_every_parameter_of_the_protocol_s_client_is_known(params: Any, body: type[BaseModel]) -> None:
    """C01: a field of the protocol is honoured, accepted where it changes nothing, or refused by a rule of its own."""
    assert {"model", "seed", "stop"} <= params.__annotations__.keys()
    assert [name for name in params.__annotations__ if name not in body.model_fields] == []


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("chat_template_kwargs", {"float": {"dict": [1, math.inf]}}, "chat_template_kwargs.float.dict.1"),
        ("documents", [{"list": [[math.nan]]}], "documents.0.list.0.0"),
    ],
)
def test_a_place_in_any_json_is_named_as_the_client_wrote_it(field: str, value: Any, place: str) -> None:
    """The validator names the type of each value on the way, and a client's key may look like such a name."""
    body = {"messages": [{"role": "user", "content": "x"}], field: value}
    with pytest.raises(ApiError, match=f"{re.escape(place)} must be a finite number") as refused:
        Translation({}).chat(body)
    assert refused.value.body.error.param == place
