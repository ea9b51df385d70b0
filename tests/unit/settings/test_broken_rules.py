"""The words for broken rules: none of the validator's own words reaches a user."""

from __future__ import annotations

import re
from string import Formatter
from typing import get_args

import pytest
from every_case import every_case
from pydantic import BaseModel
from pydantic_core.core_schema import ErrorType

from engine import EngineConfig
from engine.core.errors import ConfigError
from engine.frontend.protocols.openai.bodies import ChatBody, CompletionBody
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import GenerateBody, parse_body
from engine.frontend.schema.operator_routes import AbortBody, PauseBody, UpdateWeightsBody
from engine.process.settings import ServerSettings
from lockstep.broken_rules import RULES, broken_rule, joined_rules, nearest

THE_VALIDATOR_S = re.compile(r"Input|should|Field required|valid (string|integer|number|boolean|list|dict)|Object")
# Everything that a rule of ours may want to say.
CONTEXT = {name for rule in RULES.values() for _, name, _, _ in Formatter().parse(rule) if name}
BODIES = (GenerateBody, CompletionBody, ChatBody, AbortBody, PauseBody, UpdateWeightsBody)
VALUES = (
    "null",
    "true",
    "7",
    "-7",
    "1.5",
    "1e999",
    '"x"',
    '""',
    "[]",
    "[[]]",
    '[1, "a"]',
    "{}",
    '{"a": {}}',
    "9" * 5000,
)


@every_case("kind", get_args(ErrorType))
def test_every_kind_of_error_has_words_of_ours(kind: str) -> None:
    """C01, C09: by the validator's own list, so that a new version of it is covered too."""
    rule = broken_rule(kind, dict.fromkeys(CONTEXT, "7"))
    assert rule
    assert not THE_VALIDATOR_S.search(rule), rule


@every_case("body", BODIES)
def test_no_field_of_any_body_answers_in_the_validator_s_words(body: type[BaseModel]) -> None:
    """C01: each field with a value of each type; and the refusal says where."""
    said = [said_of(body, f'{{"{name}": {value}}}') for name in body.model_fields for value in VALUES]
    refusals = [text for text in said if text]
    assert len(refusals) > len(body.model_fields)
    assert [text for text in refusals if THE_VALIDATOR_S.search(text)] == []


def said_of(body: type[BaseModel], text: str) -> str:
    try:
        parse_body(body, text.encode())
    except ApiError as exc:
        return str(exc)
    return ""


def test_no_field_of_the_configuration_does() -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    for name in EngineConfig.model_fields:
        with pytest.raises(ConfigError) as caught:
            EngineConfig(**{name: object()})
        assert not THE_VALIDATOR_S.search(str(caught.value)), caught.value
        assert str(caught.value).startswith(f"{name} must ")


def test_branches_of_a_union_are_one_sentence() -> None:
    assert joined_rules(["must be a string", "must be a list", "must be a string"]) == "must be a string or a list"
    assert joined_rules(["must be > 0"]) == "must be > 0"
    with pytest.raises(ApiError, match=r"^prompt must be a string or a list, got 5$"):
        parse_body(CompletionBody, b'{"prompt": 5}')


@pytest.mark.parametrize(("given", "meant"), [("PP_SIZE", "pp_size"), ("pp_siez", "pp_size"), ("Tp_Size", None)])
def test_the_nearest_name_is_found_in_any_case(given: str, meant: str | None) -> None:
    assert nearest(given, ServerSettings.model_fields) == meant
