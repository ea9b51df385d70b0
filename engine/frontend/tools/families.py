"""The families of models by the format of their calls, and which of them a chat template belongs to.

Owns names, parsers, and what ids the calls of a family may have.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Final

import msgspec

from engine.frontend.tools.call_parser import CallParser
from engine.frontend.tools.hermes import HermesParser
from engine.frontend.tools.llama3 import Llama3Parser
from engine.frontend.tools.mistral import MistralParser

__all__ = ["FAMILIES", "Family", "family_of_template", "new_usual_id"]

# Mistral's templates refuse ids of any other length.
MISTRAL_ID_CHARS = 9
# Formats that share a marker with Hermes and put something else than JSON after it.
_OTHER_FORMATS = ("<function=", "<arg_key>")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """``new_id`` makes the id of a call, where the model gave none."""

    name: str
    parser: type[CallParser]
    new_id: Callable[[], str]


def new_usual_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id() -> str:
    return uuid.uuid4().hex[:MISTRAL_ID_CHARS]


FAMILIES: Final = {
    family.name: family
    for family in (
        Family(name="hermes", parser=HermesParser, new_id=new_usual_id),
        Family(name="llama3", parser=Llama3Parser, new_id=new_usual_id),
        Family(name="mistral", parser=MistralParser, new_id=_mistral_id),
    )
}


def family_of_template(template: str) -> Family | None:
    """The family of the models that have this template; None for another one, or a template without tools."""
    if "[TOOL_CALLS]" in template:
        return FAMILIES["mistral"]
    if "<tool_call>" in template and not any(mark in template for mark in _OTHER_FORMATS):
        return FAMILIES["hermes"]
    if "<|python_tag|>" in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return FAMILIES["llama3"]
    return None
