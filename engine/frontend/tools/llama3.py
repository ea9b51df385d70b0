"""Llama 3: ``{"name": ..., "parameters": {...}}`` as it is or after ``<|python_tag|>``, several with ``;`` between."""

from __future__ import annotations

from typing import Final

from engine.frontend.incoming_text import Reading
from engine.frontend.tools.call_parser import CallParser

PYTHON_TAG: Final = "<|python_tag|>"
BRACE: Final = "{"


class Llama3Parser(CallParser):
    """An object that nothing announces is a call if it names a tool and has no keys but a call's: models answer in
    JSON too.
    """

    markers = (PYTHON_TAG,)

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((PYTHON_TAG, BRACE), self._parts.say))) is not None:
            text.mark(back=len(found))
            bare = found == BRACE
            if bare:
                text.step_back(len(BRACE))
            yield from self._read_objects(bare=bare)
