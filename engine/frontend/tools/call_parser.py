"""What every family's parser finds calls with: their parts as they come out, and calls as JSON objects.

Owns what is held back until it is known whether it belongs to a call, when an object is a call (its name is known and
its arguments begin), and JSON text that is passed on as it arrives. What looked like a call and is none is given back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from engine.frontend.incoming_text import Emit, IncomingText, Reading, dropped
from engine.frontend.reasoning import CallArguments, CallBegun, CallEnded, Content, Part, appended

# The schemas of a tool's arguments by their names.
Properties = Mapping[str, Mapping[str, Any]]


class CallParts:
    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._space = ""
        self._said = False
        self._called = False

    def take(self) -> list[Part]:
        """The parts that are certain, since the last call."""
        parts, self._parts = self._parts, []
        return parts

    def say(self, text: str) -> None:
        """Add content. Whitespace at its end waits for what follows."""
        text = self._space + text
        if self._called and not self._said:
            text = text.lstrip()
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._said = True
            appended(self._parts, Content(shown))

    def begin(self, name: str, call_id: str | None = None) -> None:
        self._called = True
        self._parts.append(CallBegun(name, call_id))

    def argue(self, text: str) -> None:
        appended(self._parts, CallArguments(text))

    def end(self) -> None:
        """Add the end of a call whose arguments are complete."""
        self._parts.append(CallEnded())

    def close(self) -> None:
        """No more text follows: whitespace at the end is content if there was no call."""
        if not self._called:
            appended(self._parts, Content(self._space))


SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'[^"\\]*')
_UNSTRUCTURED = re.compile(r'[^"{}\[\]<]*')
# A number or a word.
LITERAL = re.compile(r"[\w.+-]*")
# Models write line feeds into strings where JSON wants them escaped.
_decode_string = json.JSONDecoder(strict=False).decode


def read_string(text: IncomingText, emit: Emit) -> Reading[bool]:
    """Read a string, which begins here, with its quotes. False when the text ended inside."""
    emit(text.take(1))
    while True:
        yield from text.run(_PLAIN, emit)
        character = yield from text.peek()
        if not character:
            return False
        emit(text.take(1))
        if character == '"':
            return True
        if not (yield from text.peek()):
            return False
        emit(text.take(1))


def _decoded(written: str) -> str | None:
    """What a string with its quotes says; None when it is no JSON, or half of a surrogate pair."""
    try:
        value = str(_decode_string(written))
        value.encode()
    except ValueError:
        return None
    return value


def read_value(text: IncomingText, emit: Emit, stops: Sequence[str]) -> Reading[bool]:
    """Read an object or a list, which begins here. False when it was cut: by the end, or by one of ``stops``.

    A stop is what ends a call; it cuts a value whose brackets do not close, and is not read.
    """
    depth = 0
    while True:
        yield from text.run(_UNSTRUCTURED, emit)
        character = yield from text.peek()
        if not character or (yield from text.sees(stops)) is not None:
            return False
        if character == '"':
            if not (yield from read_string(text, emit)):
                return False
            continue
        emit(text.take(1))
        depth += {"{": 1, "[": 1, "}": -1, "]": -1}.get(character, 0)
        if depth <= 0:
            return True


def skip_value(text: IncomingText, stops: Sequence[str]) -> Reading[bool]:
    """Read any value and drop it. False when it was cut, or none stands here."""
    character = yield from text.peek()
    if character == '"':
        return (yield from read_string(text, dropped))
    if character and character in "{[":
        return (yield from read_value(text, dropped, stops))
    return bool((yield from text.word(LITERAL)))


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
        return _decoded("".join(written)) if whole else None

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
            said = "" if (yield from self._text.word(LITERAL)) == "null" else None
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
