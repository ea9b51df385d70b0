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
