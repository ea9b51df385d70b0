"""The calls of Llama 3."""

from __future__ import annotations

from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.families.base import CallParser

PYTHON_TAG: Final = "<|python_tag|>"


class Llama3Parser(CallParser):
    """Llama 3: ``{"name": ..., "parameters": {...}}`` bare or after ``<|python_tag|>``, several separated by ``;``.

    A bare object is a call if it names a tool and has only the keys of a call, because models also answer in JSON.
    """

    name = "llama3"
    markers = (PYTHON_TAG,)
    separators = (";",)
    form = CallForm(before=('{"name": ',), between=(', "parameters": ',), after=("}",), separator=("; ",))

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((PYTHON_TAG, "{", "["), self._parts.say))) is not None:
            text.mark(back=len(found))
            bare = found != PYTHON_TAG
            if bare:
                text.step_back(1)
            else:
                yield from self._skip_openers(PYTHON_TAG)
            if (yield from self._read_objects(bare=bare)):
                yield from self._skip_fence_end()
