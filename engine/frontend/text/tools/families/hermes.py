"""The calls of Hermes and Qwen."""

from __future__ import annotations

from typing import Final

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.families.base import CLOSE, OPEN, CallParser

# What smaller models of the families write instead, if only a tool's name is a name there.
_OTHER_TAGS: Final = {"<tools>": "</tools>", "<function_call>": "</function_call>"}


class HermesParser(CallParser):
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call.

    Models sometimes write the name before its arguments. The objects end where their braces close, so a
    string may contain the markers.
    """

    name = "hermes"
    markers = (OPEN, CLOSE)
    closes = True
    closers = (CLOSE,)
    form = CallForm(before=(OPEN, '\n{"name": '), between=(', "arguments": ',), after=("}\n", CLOSE), separator=("\n",))

    def _read(self) -> Reading[None]:
        text = self._text
        yield from self._read_start()
        while (found := (yield from text.until((OPEN, *_OTHER_TAGS), self._parts.say))) is not None:
            text.mark(back=len(found))
            yield from self._skip_openers(found)
            if found != OPEN:
                if (yield from self._read_objects(bare=True)):
                    yield from self._skip_closers(_OTHER_TAGS[found])
                continue
            if (yield from self._read_objects()):
                yield from self._skip_closers(CLOSE)
