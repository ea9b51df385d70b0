"""The families of models by the format of their calls, and which of them a chat template belongs to.

Owns names, parsers, and what ids the calls of a family may have.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Final

import msgspec

from engine.frontend.tools import hermes, llama3, mistral
from engine.frontend.tools.call_grammar import CallForm
from engine.frontend.tools.call_parser import CallParser

__all__ = ["FAMILIES", "MISTRAL_NAMED_FORM", "Family", "family_of_template", "form_of_template", "new_usual_id"]

# Mistral's templates refuse ids of any other length.
MISTRAL_ID_CHARS = 9
# Formats that share a marker with Hermes and put something else than JSON after it.
_OTHER_FORMATS = ("<function=", "<arg_key>")


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """``form`` is how it writes calls; ``new_id`` makes the id of one, where the model gave none."""

    name: str
    parser: type[CallParser]
    form: CallForm
    new_id: Callable[[], str]


def new_usual_id() -> str:
    """An id that no other call has."""
    return f"call_{uuid.uuid4().hex[:24]}"


def _mistral_id() -> str:
    return uuid.uuid4().hex[:MISTRAL_ID_CHARS]


HERMES_FORM: Final = CallForm(
    before=(hermes.OPEN, '\n{"name": '), between=(', "arguments": ',), after=("}\n", hermes.CLOSE), separator=("\n",)
)
LLAMA3_FORM: Final = CallForm(before=('{"name": ',), between=(', "parameters": ',), after=("}",), separator=("; ",))
MISTRAL_LIST_FORM: Final = CallForm(
    opening=(mistral.CALLS, "["),
    before=('{"name": ',),
    between=(', "arguments": ',),
    after=("}",),
    separator=(", ",),
    closing=("]",),
)
MISTRAL_NAMED_FORM: Final = CallForm(before=(mistral.CALLS,), quoted=False, between=(mistral.ARGS,))

FAMILIES: Final = {
    family.name: family
    for family in (
        Family(name="hermes", parser=hermes.HermesParser, form=HERMES_FORM, new_id=new_usual_id),
        Family(name="llama3", parser=llama3.Llama3Parser, form=LLAMA3_FORM, new_id=new_usual_id),
        Family(name="mistral", parser=mistral.MistralParser, form=MISTRAL_LIST_FORM, new_id=_mistral_id),
    )
}


def form_of_template(family: Family, template: str) -> CallForm:
    """How the models that have this template write calls: newer ones of Mistral name the function first."""
    return MISTRAL_NAMED_FORM if family.name == "mistral" and mistral.ARGS in template else family.form


def family_of_template(template: str) -> Family | None:
    """The family of the models that have this template; None for another one, or a template without tools."""
    if mistral.CALLS in template:
        return FAMILIES["mistral"]
    if hermes.OPEN in template and not any(mark in template for mark in _OTHER_FORMATS):
        return FAMILIES["hermes"]
    if llama3.PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return FAMILIES["llama3"]
    return None
