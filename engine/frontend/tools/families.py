"""The families of models by the format of their calls, and which of them a chat template belongs to.

Owns names, parsers, and what ids the calls of a family may have.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Final

import msgspec

from engine.frontend.tools import deepseek, glm45, hermes, llama3, llama4, mistral, qwen3_coder
from engine.frontend.tools.call_grammar import ArgumentForm, CallForm
from engine.frontend.tools.call_parser import CallParser

# Mistral's templates refuse ids of any other length.
MISTRAL_ID_CHARS = 9
_LLAMA4_HEADER = "<|header_start|>"


class Family(msgspec.Struct, frozen=True, kw_only=True):
    """``form`` is how it writes calls; ``new_id`` makes the id of one, where the model gave none."""

    name: str
    parser: type[CallParser]
    form: CallForm
    new_id: Callable[[], str]


def new_usual_id() -> str:
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
# Between the markers, though these models may leave them out: a bracket alone is no sign of calls.
LLAMA4_FORM: Final = CallForm(
    opening=(llama4.START, "["),
    before=(),
    quoted=False,
    between=("(",),
    after=(")",),
    separator=(", ",),
    closing=("]", llama4.END),
    arguments=ArgumentForm(between=("=",), separator=(", ",), raw=False),
)
QWEN3_CODER_FORM: Final = CallForm(
    before=(qwen3_coder.OPEN, "\n" + qwen3_coder.FUNCTION),
    quoted=False,
    between=(">\n",),
    after=(qwen3_coder.END_FUNCTION + "\n", qwen3_coder.CLOSE),
    separator=("\n",),
    arguments=ArgumentForm(
        before=(qwen3_coder.PARAMETER,), between=(">\n",), after=(f"\n{qwen3_coder.END_PARAMETER}\n",), raw=True
    ),
)
GLM45_FORM: Final = CallForm(
    before=(glm45.OPEN,),
    quoted=False,
    between=("\n",),
    after=(glm45.CLOSE,),
    separator=("\n",),
    arguments=ArgumentForm(
        before=(glm45.KEY,), between=(glm45.END_KEY, "\n", glm45.VALUE), after=(glm45.END_VALUE, "\n"), raw=True
    ),
)
DEEPSEEK_FORM: Final = CallForm(
    opening=(deepseek.CALLS,),
    before=(deepseek.BEGIN,),
    quoted=False,
    between=(deepseek.SEPARATOR,),
    after=(deepseek.END,),
    closing=(deepseek.END_CALLS,),
)
DEEPSEEK_FENCED_FORM: Final = CallForm(
    opening=(deepseek.CALLS,),
    before=(deepseek.BEGIN, "function", deepseek.SEPARATOR),
    quoted=False,
    between=(f"\n{deepseek.FENCE}\n",),
    after=("\n```", deepseek.END),
    separator=("\n",),
    closing=(deepseek.END_CALLS,),
)

FAMILIES: Final = {
    family.name: family
    for family in (
        Family(name="hermes", parser=hermes.HermesParser, form=HERMES_FORM, new_id=new_usual_id),
        Family(name="llama3", parser=llama3.Llama3Parser, form=LLAMA3_FORM, new_id=new_usual_id),
        Family(name="mistral", parser=mistral.MistralParser, form=MISTRAL_LIST_FORM, new_id=_mistral_id),
        Family(name="llama4", parser=llama4.Llama4Parser, form=LLAMA4_FORM, new_id=new_usual_id),
        Family(name="qwen3_coder", parser=qwen3_coder.Qwen3CoderParser, form=QWEN3_CODER_FORM, new_id=new_usual_id),
        Family(name="glm45", parser=glm45.Glm45Parser, form=GLM45_FORM, new_id=new_usual_id),
        Family(name="deepseek", parser=deepseek.DeepSeekParser, form=DEEPSEEK_FORM, new_id=new_usual_id),
    )
}


def form_of_template(family: Family, template: str) -> CallForm:
    """How the models that have this template write calls: some families have an older and a newer way."""
    if family.name == "mistral" and mistral.ARGS in template:
        return MISTRAL_NAMED_FORM
    return DEEPSEEK_FENCED_FORM if family.name == "deepseek" and deepseek.FENCE in template else family.form


def family_of_template(template: str) -> Family | None:
    """The family of the models that have this template; None for another one, or a template without tools."""
    if mistral.CALLS in template:
        return FAMILIES["mistral"]
    if deepseek.BEGIN in template:
        return FAMILIES["deepseek"]
    if hermes.OPEN in template:
        # Formats that share a marker and put something else than JSON after it.
        other = "qwen3_coder" if qwen3_coder.FUNCTION in template else "glm45" if glm45.KEY in template else "hermes"
        return FAMILIES[other]
    if _LLAMA4_HEADER in template and ("tools" in template or llama4.START in template):
        return FAMILIES["llama4"]
    if llama3.PYTHON_TAG in template or ("<|start_header_id|>" in template and '"parameters"' in template):
        return FAMILIES["llama3"]
    return None
