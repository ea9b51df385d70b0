"""Which parsers a model gets: by the settings, or by its chat template."""

from __future__ import annotations

import re
from typing import Any, get_args

import pytest

from engine.frontend.text.dialect import Dialect, Parsing
from engine.frontend.text.reasoning import REASONING_PARSERS, ReasoningStart
from engine.frontend.text.tools.families import DEEPSEEK_FENCED_FORM, FAMILIES, MISTRAL_NAMED_FORM, family_of_template
from engine.process.settings import ServerSettings

# What is telling in the templates of models, not the templates.
TEMPLATES = {
    "hermes": '{% if tools %}<tools></tools> return <tool_call>\n{"name": ...}\n</tool_call>{% endif %}',
    "llama3": '<|start_header_id|> Respond in the format {"name": function name, "parameters": ...} {{ tools }}',
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS][TOOL_CALLS]",
    "llama4": "<|header_start|>system {{ tools }} [func_name1(params_name1=params_value1)]",
    "qwen3_coder": "{{ tools }}<tool_call>\n<function=f>\n<parameter=x>\n</tool_call>",
    "glm45": "{{ tools }}<tool_call>name\n<arg_key>x</arg_key>",
    "gpt_oss": "{{ tools }}<|start|>assistant<|channel|>analysis<|message|>",
    "kimi_k2": "{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>",
    "deepseek": "{{ tools }}<\uff5ctool\u2581calls\u2581begin\uff5c><\uff5ctool\u2581call\u2581begin\uff5c>",
}


@pytest.mark.parametrize("family", TEMPLATES)
def test_the_family_of_a_template(family: str) -> None:
    found = family_of_template(TEMPLATES[family])
    assert found is FAMILIES[family]


@pytest.mark.parametrize(
    "template",
    [
        "",
        "<|im_start|>{{ message.content }}",
        "<|header_start|>{{ message.content }}",
        "<|start_header_id|>{{ message.content }}",
    ],
)
def test_other_templates_have_no_family(template: str) -> None:
    assert family_of_template(template) is None


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}),
        (
            {"tool_call_parser": "none", "reasoning_parser": "none"},
            {"tool_call_parser": "none", "reasoning_parser": "none"},
        ),
        (
            {"tool_call_parser": "mistral", "reasoning_parser": "deepseek-r1"},
            {"tool_call_parser": "mistral", "reasoning_parser": "deepseek-r1"},
        ),
    ],
)
def test_settings_win_over_the_template(settings: dict[str, Any], expected: dict[str, str]) -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    assert Dialect.of(ServerSettings(**settings), TEMPLATES["hermes"] + "</think>").about() == expected


def test_every_family_can_be_chosen() -> None:
    """A setting has one definition, and its error names field, value, rule and remedy (C09)."""
    parsers, reasoning = (
        get_args(ServerSettings.model_fields[name].annotation) for name in ("tool_call_parser", "reasoning_parser")
    )
    assert set(parsers) == {"auto", "none", *FAMILIES}
    assert set(reasoning) == {"auto", "none", *REASONING_PARSERS}


def test_older_models_of_deepseek_are_asked_for_fenced_calls() -> None:
    forms = [Dialect.of(ServerSettings(), TEMPLATES["deepseek"] + more).form for more in ("", "```json")]
    assert forms == [FAMILIES["deepseek"].form, DEEPSEEK_FENCED_FORM]


def test_newer_models_of_mistral_are_asked_for_calls_in_their_own_form() -> None:
    forms = [Dialect.of(ServerSettings(), f"[TOOL_CALLS]{more}").form for more in ("", "[ARGS]")]
    assert forms == [FAMILIES["mistral"].form, MISTRAL_NAMED_FORM]


def test_markers_are_those_of_what_is_looked_for() -> None:
    dialect = Dialect(family=FAMILIES["mistral"], reasoning="qwen3")
    assert dialect.markers(Parsing()) == ()
    assert dialect.markers(Parsing(reasoning=ReasoningStart.OPEN)) == ("<think>", "</think>")
    assert dialect.markers(Parsing(tools=("f",))) == ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")


@pytest.mark.parametrize("family", FAMILIES)
def test_ids_of_calls_differ_and_are_what_templates_take(family: str) -> None:
    """Mistral's templates refuse ids that are not nine letters and digits."""
    dialect = Dialect(family=FAMILIES[family])
    ids = {dialect.new_call_id() for _ in range(50)}
    assert len(ids) == 50
    pattern = "[a-zA-Z0-9]{9}" if family == "mistral" else "call_[0-9a-f]{24}"
    assert all(re.fullmatch(pattern, call_id) for call_id in ids)
