"""Every field of every public body, with values of every kind: refused by its name, or taken as it was sent."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import BaseModel

from engine.core.config import EngineConfig
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.frontend.http.routes.generation import EMBEDDINGS, ROUTES, orders_of
from engine.frontend.protocols.anthropic import MessagesBody
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody
from engine.frontend.protocols.openai.embeddings import EmbeddingBody
from engine.frontend.protocols.openai.response_bodies import ResponseBody
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import GenerateBody, SamplingBody, parse_body
from engine.frontend.sessions.prefill_bodies import PREFILL
from engine.frontend.sessions.requests import ServedModel
from engine.frontend.text.dialect import PLAIN
from engine.frontend.text.tokenizer import load_tokenizer

MESSAGES: list[Any] = [{"role": "user", "content": "x"}]
# The least body of each type.
BODIES: dict[type[BaseModel], dict[str, Any]] = {
    GenerateBody: {"text": "x"},
    SamplingBody: {},
    CompletionBody: {"prompt": "x", "model": "embedded"},
    ChatBody: {"messages": MESSAGES, "model": "embedded"},
    ResponseBody: {"input": "x", "model": "embedded"},
    MessagesBody: {"messages": MESSAGES, "max_tokens": 5, "model": "embedded"},
    EmbeddingBody: {"input": "x", "model": "embedded"},
}
VALUES = (
    *("null", "true", "false", "0", "-1", "1", "1.5", "1e400", "NaN", "-Infinity", "1e308", "9" * 400, str(2**64)),
    *('""', '"x"', '"1"', f'"{"y" * 300_000}"', "[]", "[null]", "[1]", '["x"]', "[[]]", "{}", '{"a":1}', "[1e400]"),
)
# A prefill engine's route is for operators.
PUBLIC = [path for path in ROUTES if path != PREFILL]
# Fields of which one excludes the other, so that no single one is at fault.
OF_TWO = {(GenerateBody, "text"), (GenerateBody, "input_ids")}


def fields_of(model: type[BaseModel]) -> list[str]:
    return [field.alias or name for name, field in model.model_fields.items()]


def taken_or_refused(model: type[BaseModel], data: bytes) -> tuple[BaseModel | None, ApiError | None]:
    try:
        return parse_body(model, data), None
    except ApiError as refusal:
        return None, refusal


def is_same(taken: Any, sent: Any) -> bool:
    """1 may become 1.0, and never true."""
    if isinstance(sent, bool) or isinstance(taken, bool):
        return taken is sent
    return bool(taken == sent)


@pytest.mark.parametrize("model", BODIES)
def test_a_value_is_refused_by_the_name_of_its_field_or_taken_as_it_is(model: type[BaseModel]) -> None:
    refused = 0
    for name in fields_of(model):
        for text in VALUES:
            others = "".join(
                f"{json.dumps(key)}:{json.dumps(one)}," for key, one in BODIES[model].items() if key != name
            )
            data = f'{{{others}"{name}":{text}}}'.encode()
            body, refusal = taken_or_refused(model, data)
            if body is not None:
                taken = body.model_dump(by_alias=True, exclude_unset=True).get(name)
                assert is_same(taken, json.loads(text)), (name, text[:40], taken)
            if refusal is not None:
                refused += 1
                told = str(refusal.body.error.param).replace("[", ".").split(".")
                assert refusal.status == 400
                assert name in told or (model, name) in OF_TWO, (name, text[:40], refusal)
    assert refused > 5 * len(fields_of(model))


TOOL = '{"type": "function", "function": {"name": "f", "parameters": {"minimum": *}}}'
USE = '{"type": "tool_use", "id": "1", "name": "f", "input": {"x": *}}'
# Where any JSON may be, by the field that a refusal names.
FREE: tuple[tuple[type[BaseModel], str, str], ...] = (
    (GenerateBody, "sampling_params.json_schema", '"sampling_params": {"json_schema": {"minimum": *}}'),
    (ChatBody, "chat_template_kwargs", '"chat_template_kwargs": {"x": *}'),
    (ChatBody, "documents", '"documents": [{"x": *}]'),
    (ChatBody, "tools.0.function.parameters", f'"tools": [{TOOL}]'),
    (
        ChatBody,
        "response_format.json_schema.schema",
        '"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"minimum": *}}}',
    ),
    (ResponseBody, "chat_template_kwargs", '"chat_template_kwargs": {"x": *}'),
    (ResponseBody, "tools.0.parameters", '"tools": [{"type": "function", "name": "f", "parameters": {"minimum": *}}]'),
    (
        ResponseBody,
        "text.format.schema",
        '"text": {"format": {"type": "json_schema", "name": "x", "schema": {"minimum": *}}}',
    ),
    (MessagesBody, "tools.0.input_schema", '"tools": [{"name": "f", "input_schema": {"minimum": *}}]'),
    (
        MessagesBody,
        "output_config.format.schema",
        '"output_config": {"format": {"type": "json_schema", "schema": {"minimum": *}}}',
    ),
    (MessagesBody, "messages.0.content.0.input", f'"messages": [{{"role": "assistant", "content": [{USE}]}}]'),
)


@pytest.mark.parametrize(("model", "place", "field"), FREE)
def test_a_number_that_json_lacks_is_refused_at_its_place(model: type[BaseModel], place: str, field: str) -> None:
    """Also deep in a value of any kind, where a template would have written it into the prompt."""
    name = field[1 : field.index('"', 1)]
    others = "".join(f"{json.dumps(key)}:{json.dumps(one)}," for key, one in BODIES[model].items() if key != name)
    for number in ("NaN", "Infinity", "-Infinity", "1e400", "[1, [NaN]]", '{"y": {"z": -1e999}}'):
        _, refusal = taken_or_refused(model, f"{{{others}{field.replace('*', number)}}}".encode())
        assert refusal is not None, number
        assert str(refusal.body.error.param).startswith(place), refusal
        assert "finite" in str(refusal), refusal
    body, _ = taken_or_refused(model, f"{{{others}{field.replace('*', '1e300')}}}".encode())
    assert body is not None


@pytest.fixture(scope="module")
def served() -> ServedModel:
    config = EngineConfig()
    tokenizer, template = load_tokenizer(config)
    return ServedModel(tokenizer, template, Limits.of(config, EMBEDDED_FACTS), "embedded", PLAIN, {})


def test_every_public_body_is_tried() -> None:
    assert {ROUTES[path].about["body"] for path in PUBLIC} <= BODIES.keys()


@pytest.mark.parametrize("path", [path for path in PUBLIC if path != EMBEDDINGS])
def test_of_a_key_that_is_there_twice_the_last_one_counts(served: ServedModel, path: str) -> None:
    """As on other servers, and each value by itself is none that is refused."""
    least = json.dumps(BODIES[ROUTES[path].about["body"]])[1:-1]
    (message,) = orders_of(served)[path](f'{{"priority":1,{least},"priority":2}}'.encode()).messages
    assert message.priority == 2


def test_a_result_of_a_tool_may_name_a_call_that_the_conversation_lacks(served: ServedModel) -> None:
    """A client may have cut the conversation; the template gets the id."""
    messages = [*MESSAGES, {"role": "tool", "tool_call_id": "gone", "content": "42"}]
    assert orders_of(served)["/v1/chat/completions"](json.dumps({"messages": messages}).encode()).messages
