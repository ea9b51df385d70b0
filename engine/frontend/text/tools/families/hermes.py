"""The calls of Hermes and Qwen."""

from __future__ import annotations

import re

from engine.frontend.text.incoming_text import Reading
from engine.frontend.text.tools.call_grammar import CallForm
from engine.frontend.text.tools.families.base import CLOSE, OPEN, CallParser
from engine.frontend.text.tools.json_values import SPACE

_NAME = re.compile(r"[\w.-]*")


class HermesParser(CallParser):
    """Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call.

    Models sometimes write the name before an object of arguments. The objects end where their braces close, so a
    string may contain the markers.
    """

    name = "hermes"
    markers = (OPEN, CLOSE)
    closes = True
    form = CallForm(before=(OPEN, '\n{"name": '), between=(', "arguments": ',), after=("}\n", CLOSE), separator=("\n",))

    def _read(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((OPEN,), self._parts.say)) is not None:
            text.mark(back=len(OPEN))
            yield from self._skip_openers(OPEN)
            name = yield from text.word(_NAME)
            if name:
                yield from text.run(SPACE)
                if name not in self._tools or (yield from text.peek()) != "{":
                    self._give_back()
                    continue
                yield from self._read_object_of(name)
                yield from self._skip_closers(CLOSE)
                continue
            if (yield from self._read_objects()):
                yield from self._skip_closers(CLOSE)
