"""Llama 4: ``[name(key=value), ...]``, calls as Python writes them, as they are or between two markers."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.incoming_text import Reading
from engine.frontend.tools.argument_values import WrittenArguments, read_python_value
from engine.frontend.tools.call_parser import SPACE, CallParser

START: Final = "<|python_start|>"
END: Final = "<|python_end|>"
BRACKET: Final = "["
_NAME = re.compile(r"[\w.-]*")
_KEY = re.compile(r"[^\s=,()\[\]{}\"']*")
_BETWEEN = re.compile(r"[\s,]*")


class Llama4Parser(CallParser):
    """A list that nothing announces is one of calls if it begins with the name of a tool. After the marker JSON, which
    the models of this family write too, is read as Llama 3 writes it.
    """

    markers = (START, END)

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((START, BRACKET), self._parts.say))) is not None:
            text.mark(back=len(found))
            bare = found == BRACKET
            if not bare:
                yield from text.run(SPACE)
                character = yield from text.peek()
                if character == "{":
                    yield from self._read_objects()
                    yield from text.marker((END,))
                    continue
                if character != BRACKET:
                    self._give_back()
                    continue
                text.take(1)
            yield from self._read_list(bare=bare)

    def _read_list(self, *, bare: bool) -> Reading[None]:
        """Read calls up to the end of their list. What was marked is given back if there is none."""
        text = self._text
        while True:
            yield from text.run(SPACE)
            name = yield from text.word(_NAME)
            if not name or (bare and name not in self._tools) or (yield from text.peek()) != "(":
                break
            text.take(1)
            if not (yield from self._read_call(name)):
                return
            yield from text.run(_BETWEEN)
            text.mark()
            if (yield from text.peek()) == "]":
                text.take(1)
                text.unmark()
                yield from text.run(SPACE)
                yield from text.marker((END,))
                return
        self._give_back()

    def _read_call(self, name: str) -> Reading[bool]:
        """Read the arguments of a call; False when it was cut, or is none: arguments have names."""
        text, arguments, begun = self._text, WrittenArguments(self._parts), False
        while True:
            yield from text.run(SPACE)
            closed = (yield from text.peek()) == ")"
            key = "" if closed else (yield from text.word(_KEY))
            yield from text.run(SPACE)
            if not closed and (not key or (yield from text.peek()) != "="):
                self._give_back()
                return False
            text.take(1)
            if not begun:
                begun = True
                text.unmark()
                self._parts.begin(name)
            if closed:
                arguments.end()
                return True
            yield from text.run(SPACE)
            arguments.key(key)
            if not (yield from read_python_value(text, arguments.add)):
                return False
            yield from text.run(SPACE)
            if (yield from text.peek()) == ",":
                text.take(1)
