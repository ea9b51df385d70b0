"""Qwen3-Coder: ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``, in lines."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.incoming_text import Reading
from engine.frontend.tools.argument_values import TaggedValues, WrittenArguments
from engine.frontend.tools.call_parser import SPACE, CallParser

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"
FUNCTION: Final = "<function="
END_FUNCTION: Final = "</function>"
PARAMETER: Final = "<parameter="
END_PARAMETER: Final = "</parameter>"
_NAME = re.compile(r"[^<>\n]*")


class Qwen3CoderParser(CallParser):
    """Models leave the outer tag out at times: a function that is one of the tools is a call without it."""

    markers = (OPEN, CLOSE)
    closes = True
    typed = True

    def _read(self) -> Reading[None]:
        text = self._text
        while (found := (yield from text.until((OPEN, FUNCTION), self._parts.say))) is not None:
            text.mark(back=len(found))
            if found == OPEN:
                yield from text.run(SPACE)
            if found == OPEN and (yield from text.marker((FUNCTION,))) is None:
                self._give_back()
                continue
            yield from self._read_function(bare=found == FUNCTION)

    def _read_function(self, *, bare: bool) -> Reading[None]:
        text = self._text
        name = yield from self._read_name()
        if not name or (bare and name not in self._tools) or (yield from text.peek()) != ">":
            self._give_back()
            return
        text.take(1)
        text.unmark()
        self._parts.begin(name)
        arguments, properties = WrittenArguments(self._parts), self._properties.get(name, {})
        values = TaggedValues(text, close=END_PARAMETER, followers=(PARAMETER, END_FUNCTION, CLOSE), lines=True)
        while True:
            yield from text.run(SPACE)
            if (yield from text.marker((PARAMETER,))) is None:
                break
            key = yield from self._read_name()
            if (yield from text.peek()) != ">":
                return
            text.take(1)
            arguments.key(key)
            if not (yield from values.read(properties.get(key, {}), arguments)):
                return
        closed = (yield from text.marker((END_FUNCTION,))) is not None
        yield from text.run(SPACE)
        if (yield from text.marker((CLOSE,))) is not None or closed:
            arguments.end()

    def _read_name(self) -> Reading[str]:
        return (yield from self._text.word(_NAME)).strip()
