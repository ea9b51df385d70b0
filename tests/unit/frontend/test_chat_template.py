"""The chat template: its input, and the error for a conversation that it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from engine.frontend.schema.errors import ApiError
from engine.frontend.text.tokenizer import ChatTemplate

CALLS = "{% for message in messages %}{% for call in message.tool_calls %}"
END = "{% endfor %}{% endfor %}"
AS_OBJECT = (
    CALLS + "{{ call.function.arguments | tojson }}{% for key in call.function.arguments.keys() %}{% endfor %}" + END
)
AS_TEXT = CALLS + "{{ '```' + call.function.arguments + '```' }}" + END


def template(text: str | dict[str, str] | None) -> ChatTemplate:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab={"a": 0}, merges=[])))
    tokenizer.chat_template = text
    return ChatTemplate(tokenizer)


def called(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    return [{"role": "user", "content": "x"}, {"role": "assistant", "content": "", "tool_calls": [call]}]


@pytest.mark.parametrize(
    ("text", "prompt"), [(AS_OBJECT, '{"a": "\u20ac"}'), (AS_TEXT, '```{"a": "\u20ac"}```')], ids=["object", "text"]
)
def test_arguments_are_what_the_template_takes(text: str, prompt: str) -> None:
    """C04: Qwen's and Hermes' templates write the object themselves, DeepSeek's put the text in as it is."""
    assert template(text).render(called({"a": "\u20ac"}), {}) == prompt


def test_a_template_that_takes_neither_says_why() -> None:
    with pytest.raises(ApiError, match="the model's chat template must accept the messages, but: 'str object' has no"):
        template(AS_OBJECT).render(called("cut"), {})
    with pytest.raises(ApiError, match="but: can only concatenate str"):
        template("{{ 'x' + 1 }}").render(called({}), {})


WALK = (
    "{% macro walk(x) %}{% if x is mapping %}{% for key in x %}{{ key }}({{ walk(x[key]) }}){% endfor %}"
    "{% else %}{{ x }}{% endif %}{% endmacro %}{{ walk(tools[0]) }}"
)


def test_tools_too_deep_for_a_template_that_walks_them_are_the_client_s_fault() -> None:
    """46.3: gpt-oss's template writes types by a macro that calls itself; 200 levels of JSON were answered with 500."""
    deep: dict[str, Any] = {}
    for _ in range(190):
        deep = {"a": deep}
    asked = [{"role": "user", "content": "x"}]
    assert template(WALK).render(asked, {}, tools=[{"a": {"a": 1}}]) == "a(a(1))"
    with pytest.raises(ApiError, match="or the tools are nested too deeply for it; nest objects less") as caught:
        template(WALK).render(asked, {}, tools=[deep])
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("text", "knows"),
    [
        ("{% if tools %}x{% endif %}", True),
        ("{{ message.toolset }}", False),
        ({"default": "x", "tool_use": "{{ tools }}"}, True),
        (None, False),
    ],
)
def test_a_template_that_names_tools_knows_them(text: str | dict[str, str] | None, knows: bool) -> None:
    assert template(text).knows_tools is knows


def test_the_template_for_tools_is_taken_where_there_are_two() -> None:
    """The chat template is the tokenizer's (C04)."""
    both = template({"default": "plain", "tool_use": "{{ tools[0].function.name }}"})
    assert both.render([{"role": "user", "content": "x"}], {}) == "plain"
    offered = [{"type": "function", "function": {"name": "f"}}]
    assert both.render([{"role": "user", "content": "x"}], {}, tools=offered) == "f"
