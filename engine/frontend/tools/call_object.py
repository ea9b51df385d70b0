"""A call as a JSON object: ``{"name": ..., "arguments": {...}}``, its keys in any order.

Owns when such an object is a call: when its name is known and its arguments begin. From there on they are passed on as
they arrive. Before it, nothing is given out.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Final

from engine.frontend.incoming_text import IncomingText, Reading
from engine.frontend.tools.call_parts import CallParts
from engine.frontend.tools.json_text import SPACE, decoded_string, read_literal, read_string, read_value, skip_value

__all__ = ["CallObject"]

NO_ARGUMENTS: Final = "{}"
NAME: Final = "name"
ARGUMENTS: Final = ("arguments", "parameters")
# The keys of a call that nothing announces. An object with any other one is an answer in JSON.
KEYS_OF_A_BARE_CALL: Final = frozenset((NAME, *ARGUMENTS, "type", "id"))
_COMMAS = re.compile(r"[\s,]*")


class CallObject:
    """Reads one object. With ``tools`` only the name of one of these makes it a call, and only a call's keys do."""

    def __init__(
        self, text: IncomingText, parts: CallParts, stops: Sequence[str], tools: Collection[str] | None
    ) -> None:
        self._text = text
        self._parts = parts
        self._stops = stops
        self._tools = tools
        self._name: str | None = None
        self._arguments: str | None = None
        self._begun = False

    def read(self) -> Reading[bool]:
        """True for a call, though it may be cut; False for what is none, of which nothing was given out."""
        text = self._text
        text.take(1)
        while True:
            yield from text.run(_COMMAS)
            character = yield from text.peek()
            if character == "}":
                text.take(1)
                return self._close()
            if character != '"' or not (yield from self._read_entry()):
                return self._begun

    def _close(self) -> bool:
        """The object is complete; a call that has no arguments has none of them."""
        if self._name is not None and not self._begun:
            self._give(NO_ARGUMENTS)
        return self._begun

    def _read_entry(self) -> Reading[bool]:
        """Read a key and its value; False when the object cannot be read on, or is no call."""
        text = self._text
        key = yield from self._read_text()
        yield from text.run(SPACE)
        if key is None or (yield from text.peek()) != ":":
            return False
        text.take(1)
        yield from text.run(SPACE)
        if self._tools is not None and key not in KEYS_OF_A_BARE_CALL:
            return False
        if key == NAME and self._name is None:
            return (yield from self._read_name())
        if key in ARGUMENTS and self._arguments is None and not self._begun:
            return (yield from self._read_arguments())
        return (yield from skip_value(text, self._stops))

    def _read_text(self) -> Reading[str | None]:
        """A string, decoded; None for what is none."""
        if (yield from self._text.peek()) != '"':
            return None
        written: list[str] = []
        whole = yield from read_string(self._text, written.append)
        return decoded_string("".join(written)) if whole else None

    def _read_name(self) -> Reading[bool]:
        name = yield from self._read_text()
        if not name or (self._tools is not None and name not in self._tools):
            return False
        self._name = name
        if self._arguments is not None:
            self._give(self._arguments)
        return True

    def _read_arguments(self) -> Reading[bool]:
        """Read the arguments: an object, an object in a string, or null for none."""
        character = yield from self._text.peek()
        if character == "{":
            return (yield from self._read_object())
        if character == '"':
            said = yield from self._read_text()
        else:
            said = "" if (yield from read_literal(self._text)) == "null" else None
        if said is None:
            return False
        self._give(said or NO_ARGUMENTS)
        return True

    def _read_object(self) -> Reading[bool]:
        """Pass an object on as it arrives, or keep it until the name is known."""
        if self._name is None:
            kept: list[str] = []
            whole = yield from read_value(self._text, kept.append, self._stops)
            if whole:
                self._arguments = "".join(kept)
            return whole
        self._begin(self._name)
        whole = yield from read_value(self._text, self._parts.argue, self._stops)
        if whole:
            self._parts.end()
        return whole

    def _give(self, arguments: str) -> None:
        """Give all arguments out, or keep them until the name is known."""
        if self._name is None:
            self._arguments = arguments
            return
        self._begin(self._name)
        self._parts.argue(arguments)
        self._parts.end()

    def _begin(self, name: str) -> None:
        self._begun = True
        self._text.unmark()
        self._parts.begin(name)
