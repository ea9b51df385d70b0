"""Mistral: ``[TOOL_CALLS][{"name": ..., "arguments": {...}}]``, or ``[TOOL_CALLS]name[ARGS]{...}`` for each call."""

from __future__ import annotations

import re
from typing import Final

from engine.frontend.incoming_text import Reading
from engine.frontend.tools.call_parser import SPACE, CallParser, read_value

CALLS: Final = "[TOOL_CALLS]"
CALL_ID: Final = "[CALL_ID]"
ARGS: Final = "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}]*")


class MistralParser(CallParser):
    """Newer models give each call an id between name and arguments; some leave ``[ARGS]`` out."""

    markers = (CALLS, CALL_ID, ARGS)

    def _read(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((CALLS,), self._parts.say)) is not None:
            text.mark(back=len(CALLS))
            yield from text.run(SPACE)
            first = yield from text.peek()
            if first and first in "[{":
                yield from self._read_objects()
            else:
                yield from self._read_named()

    def _read_named(self) -> Reading[None]:
        """Read one call whose name stands before its arguments."""
        text = self._text
        name = yield from self._read_name()
        call_id = None
        if (yield from text.marker((CALL_ID,))) is not None:
            call_id = (yield from self._read_name()) or None
        yield from text.marker((ARGS,))
        yield from text.run(SPACE)
        if not name or (yield from text.peek()) != "{":
            self._give_back()
            return
        text.unmark()
        self._parts.begin(name, call_id)
        if (yield from read_value(text, self._parts.argue, self.markers)):
            self._parts.end()
        yield from self._read_between()

    def _read_name(self) -> Reading[str]:
        name = yield from self._text.word(_NAME)
        yield from self._text.run(SPACE)
        return name
