"""Hermes and Qwen: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, once for each call."""

from __future__ import annotations

from typing import Final

from engine.frontend.incoming_text import Reading
from engine.frontend.tools.call_parser import CallParser

OPEN: Final = "<tool_call>"
CLOSE: Final = "</tool_call>"


class HermesParser(CallParser):
    """The objects end where their braces close, so that a string may name the markers."""

    markers = (OPEN, CLOSE)
    closes = True

    def _read(self) -> Reading[None]:
        text = self._text
        while (yield from text.until((OPEN,), self._parts.say)) is not None:
            text.mark(back=len(OPEN))
            yield from self._read_objects()
            yield from text.marker((CLOSE,))
