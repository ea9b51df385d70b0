"""Arguments between tags: each value up to its closing tag, passed on as it arrives where it is a text.

Owns which tag closes a value: one that stands in the text of a value does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.frontend.incoming_text import Emit, IncomingText, Reading
from engine.frontend.tools.argument_values import WrittenArguments, escaped, is_text, json_of
from engine.frontend.tools.json_text import SPACE

__all__ = ["TaggedValues"]


class TaggedValues:
    """``close`` closes a value when one of ``followers`` comes next, or nothing does.

    With ``lines`` a value stands in lines of its own: a line feed before and one after it are no part of it.
    """

    def __init__(self, text: IncomingText, *, close: str, followers: Sequence[str], lines: bool) -> None:
        self._text = text
        self._close = close
        self._followers = followers
        self._lines = lines

    def read(self, schema: Mapping[str, Any], arguments: WrittenArguments) -> Reading[bool]:
        """Read a value, and add it to the arguments. False when it was cut."""
        if is_text(schema):
            arguments.add('"')
            whole = yield from self._until_closed(lambda text: arguments.add(escaped(text)))
            if whole:
                arguments.add('"')
            return whole
        kept: list[str] = []
        whole = yield from self._until_closed(kept.append)
        if whole:
            arguments.add(json_of("".join(kept), schema))
        return whole

    def _until_closed(self, emit: Emit) -> Reading[bool]:
        value = _OwnLines(emit) if self._lines else emit
        while (yield from self._text.until((self._close,), value)) is not None:
            space: list[str] = []
            yield from self._text.run(SPACE, space.append)
            if not (yield from self._text.peek()) or (yield from self._text.sees(self._followers)) is not None:
                return True
            value(self._close + "".join(space))
        return False


class _OwnLines:
    """Passes a value on without the line feeds around it."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit
        self._begun = False
        self._held = ""

    def __call__(self, text: str) -> None:
        if text and not self._begun:
            self._begun = True
            text = text.removeprefix("\n")
        text = self._held + text
        shown = text.removesuffix("\n")
        self._held = text[len(shown) :]
        if shown:
            self._emit(shown)
