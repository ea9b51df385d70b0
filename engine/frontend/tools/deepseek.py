"""DeepSeek V3.1: the name, a separator, JSON. V3 and R1: a type, the separator, the name, JSON in a fenced block.

Each call stands between two markers, all calls between two more.
"""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.incoming_text import Reading
from engine.frontend.tools.call_parser import SPACE, CallParser, read_value


def _marker(*words: str) -> str:
    """A marker of the family: a wide bar at both ends, a low block between words."""
    return "<\uff5c" + "\u2581".join(words) + "\uff5c>"


CALLS: Final = _marker("tool", "calls", "begin")
END_CALLS: Final = _marker("tool", "calls", "end")
BEGIN: Final = _marker("tool", "call", "begin")
END: Final = _marker("tool", "call", "end")
SEPARATOR: Final = _marker("tool", "sep")
FENCE: Final = "```json"
_NAME = re.compile(r"[^\s<>{}`]*")
_REST = re.compile(r"[\s`}]*")


class DeepSeekParser(CallParser):
    """What stands before the separator is the name, unless the arguments do not come right after it."""

    markers = (CALLS, END_CALLS, BEGIN, END, SEPARATOR)
    closes = True

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((CALLS, BEGIN), self._parts.say))) is not None:
            text.mark(back=len(found))
            if found == CALLS:
                yield from text.run(SPACE)
                if (yield from text.marker((BEGIN,))) is None:
                    self._give_back()
                    continue
            while (yield from self._read_call()):
                text.mark(back=len(BEGIN))
            yield from text.marker((END_CALLS,))

    def _read_call(self) -> Reading[bool]:
        """Read one call; True when the beginning of another one was read after it."""
        text = self._text
        name = yield from self._read_name()
        separated = (yield from text.marker((SEPARATOR,))) is not None
        yield from text.run(SPACE)
        if separated and (yield from text.peek()) != "{":
            name = yield from self._read_name()
            yield from text.marker((FENCE,))
            yield from text.run(SPACE)
        if not (separated and name) or (yield from text.peek()) != "{":
            self._give_back()
            return False
        text.unmark()
        self._parts.begin(name)
        if (yield from read_value(text, self._parts.argue, self.markers)):
            self._parts.end()
        yield from text.run(_REST)
        yield from text.marker((END,))
        yield from text.run(SPACE)
        return (yield from text.marker((BEGIN,))) is not None

    def _read_name(self) -> Reading[str]:
        yield from self._text.run(SPACE)
        name = yield from self._text.word(_NAME)
        yield from self._text.run(SPACE)
        return name
