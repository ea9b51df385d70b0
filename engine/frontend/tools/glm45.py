"""GLM-4.5 and later: ``<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>``."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.incoming_text import Reading
from engine.frontend.tools.argument_values import TaggedValues, WrittenArguments
from engine.frontend.tools.call_parser import SPACE, CallParser

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
KEY: Final = "<arg_key>"
END_KEY: Final = "</arg_key>"
VALUE: Final = "<arg_value>"
END_VALUE: Final = "</arg_value>"
# Neither crosses a tag: a stray one would be read as a part of a key.
_NAME = re.compile(r"[^<>\s{}]*")
_KEY = re.compile(r"[^<]*")


class Glm45Parser(CallParser):
    """The tags stand in lines or in one line. A call without arguments is a name alone."""

    markers = (OPEN, CLOSE, KEY, END_KEY, VALUE, END_VALUE)
    closes = True
    typed = True

    def _read(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((OPEN,), self._parts.say)) is not None:
            text.mark(back=len(OPEN))
            yield from text.run(SPACE)
            name = yield from text.word(_NAME)
            yield from text.run(SPACE)
            if not name or (yield from text.sees((KEY, CLOSE))) is None:
                self._give_back()
                continue
            text.unmark()
            self._parts.begin(name)
            yield from self._read_arguments(name)

    def _read_arguments(self, name: str) -> Reading[None]:
        """Read up to the end of the call; what is cut has no end."""
        text, arguments, properties = self._text, WrittenArguments(self._parts), self._properties.get(name, {})
        values = TaggedValues(text, close=END_VALUE, followers=(KEY, CLOSE), lines=False)
        while (yield from text.marker((KEY,))) is not None:
            key = yield from self._read_key()
            if (yield from text.marker((VALUE,))) is None:
                return
            arguments.key(key)
            if not (yield from values.read(properties.get(key, {}), arguments)):
                return
            yield from text.run(SPACE)
        if (yield from text.marker((CLOSE,))) is not None:
            arguments.end()

    def _read_key(self) -> Reading[str]:
        """Read a key and the tags around it, which models double at times."""
        text = self._text
        while (yield from text.marker((KEY,))) is not None:
            pass
        key = yield from text.word(_KEY)
        while (yield from text.marker((END_KEY,))) is not None:
            yield from text.run(SPACE)
        return key.strip()
