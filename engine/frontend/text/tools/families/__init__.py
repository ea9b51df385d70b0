"""The parsers of tool calls, one file for each family of models, and the choice of a family for a chat template."""

from __future__ import annotations

from typing import Final

from engine.frontend.text.reasoning import CHANNEL, MESSAGE
from engine.frontend.text.tools.families.base import OPEN, CallParser
from engine.frontend.text.tools.families.deepseek import (
    CALL,
    CALLS,
    DEEPSEEK_FENCED_FORM,
    END_CALL,
    END_CALLS,
    SEPARATOR,
    DeepSeekParser,
)
from engine.frontend.text.tools.families.glm45 import KEY, Glm45Parser
from engine.frontend.text.tools.families.gpt_oss import GptOssParser
from engine.frontend.text.tools.families.hermes import HermesParser
from engine.frontend.text.tools.families.kimi_k2 import SECTION, KimiK2Parser
from engine.frontend.text.tools.families.llama3 import PYTHON_TAG, Llama3Parser
from engine.frontend.text.tools.families.llama4 import START, Llama4Parser
from engine.frontend.text.tools.families.mistral import MISTRAL_NAMED_FORM, TOOL_CALLS, MistralParser
from engine.frontend.text.tools.families.qwen3_coder import FUNCTION, Qwen3CoderParser

__all__ = [
    "CALL",
    "CALLS",
    "DEEPSEEK_FENCED_FORM",
    "END_CALL",
    "END_CALLS",
    "FAMILIES",
    "MISTRAL_NAMED_FORM",
    "SEPARATOR",
    "CallParser",
    "GptOssParser",
    "HermesParser",
    "Llama3Parser",
    "MistralParser",
    "family_of_template",
]

_ALL = (
    HermesParser,
    Llama3Parser,
    MistralParser,
    Llama4Parser,
    Qwen3CoderParser,
    Glm45Parser,
    DeepSeekParser,
    KimiK2Parser,
    GptOssParser,
)
FAMILIES: Final[dict[str, type[CallParser]]] = {family.name: family for family in _ALL}


def family_of_template(template: str) -> type[CallParser] | None:
    """Return the family of a chat template; None for an unknown one or one without tools."""
    if TOOL_CALLS in template:
        return MistralParser
    if CALL in template:
        return DeepSeekParser
    if CHANNEL in template and MESSAGE in template:
        return GptOssParser
    if SECTION in template:
        return KimiK2Parser
    if OPEN in template:
        # Formats with the same marker, which is not followed by JSON.
        if FUNCTION in template:
            return Qwen3CoderParser
        return Glm45Parser if KEY in template else HermesParser
    if "<|header_start|>" in template and ("tools" in template or START in template):
        return Llama4Parser
    if PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return Llama3Parser
    return None
