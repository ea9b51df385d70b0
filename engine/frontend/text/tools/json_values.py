"""Reads JSON as models write it, and passes it on as valid JSON: an object or a list with all its brackets, a string.

Values are passed on as they arrive. Knows nothing of calls, except for the texts that end one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from engine.frontend.text.incoming_text import Emit, IncomingText, Reading, dropped
from engine.frontend.text.tools.closing_tags import is_closer


def is_object(written: str) -> bool:
    try:
        return isinstance(json.loads(written, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def refuse_constant(word: str) -> Any:
    """Refuse NaN and the infinities, which Python accepts but JSON lacks."""
    raise ValueError(f"{word} is not JSON")


def escaped(text: str) -> str:
    """Escape a text for a JSON string. Pieces can be escaped separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


SPACE = re.compile(r"\s*")
# Text in quotes up to the next escape, by the kind of quote.
PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
# Models write raw line feeds into strings, which JSON requires to be escaped.
_CONTROLS = re.compile(r"[\x00-\x1f]")
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
# A number or a word.
LITERAL = re.compile(r"[\w.+-]*")


def read_string(text: IncomingText, emit: Emit) -> Reading[bool]:
    """Read a string at this position, with its quotes. False if the text ended inside.

    Control characters and backslashes that JSON does not allow in a string are escaped.
    """
    emit(text.take(1))
    while True:
        yield from text.run(PLAIN['"'], lambda piece: emit(_CONTROLS.sub(lambda found: escaped(found[0]), piece)))
        character = yield from text.peek()
        if not character:
            return False
        text.take(1)
        if character == '"':
            emit(character)
            return True
        if not (yield from _read_json_escape(text, emit)):
            return False


def _read_json_escape(text: IncomingText, emit: Emit) -> Reading[bool]:
    """Read what follows a backslash; one that escapes nothing is literal. False if the text ended inside."""
    character = yield from text.peek()
    if not character:
        return False
    if character in _SIMPLE_ESCAPES:
        emit("\\" + text.take(1))
        return True
    if character != "u":
        emit("\\\\")
        return True
    code = text.take(1)
    while len(code) < 5 and (character := (yield from text.peek())) in _HEX:
        code += text.take(1)
    if len(code) < 5 and not character:
        return False
    emit(("\\" if len(code) == 5 else "\\\\") + code)
    return True


_decode_string = json.JSONDecoder(strict=False).decode


def decoded(written: str) -> str | None:
    """Decode a quoted string; None if it is not JSON or has half of a surrogate pair."""
    try:
        value = str(_decode_string(written))
        value.encode()
    except ValueError:
        return None
    return value


_BETWEEN_BRACKETS = re.compile(r'[^"{}\[\],<;`]*')
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
# Models write them where JSON has true, false and null.
_PYTHON_WORD = re.compile(r"\b(?:True|False|None)\b")
_NEVER_AFTER_A_CLOSER = re.compile(r"[^\s{\[]")
_CLOSER = {"{": "}", "[": "]"}


class JsonValue:
    """Reads an object or a list at this position, and passes it on with all brackets closed in order.

    ``stops`` end a call, and cut a value whose brackets do not close. Omits brackets that close nothing, commas before
    a closing bracket, and words right after a string or a bracket. Writes Python's words as JSON's.
    """

    def __init__(self, text: IncomingText, emit: Emit, stops: Sequence[str]) -> None:
        self._text = text
        self._emit = emit
        self._stops = stops
        # The expected closing brackets, and the number of each kind.
        self._due: list[str] = []
        self._count = {"}": 0, "]": 0}
        # A comma and the space after it, until something follows.
        self._held = ""
        self._wants_key = False
        # True right after a string or a bracket was closed, when no word can follow.
        self._closed = False

    def read(self) -> Reading[str]:
        """Read the value and return the closers that it lacks, none for a complete one."""
        text = self._text
        while True:
            between = yield from text.word(_BETWEEN_BRACKETS)
            if between:
                self._pass(_PYTHON_WORD.sub(lambda found: PYTHON_WORDS[found[0]], between))
            character = yield from text.peek()
            if not character and not text.has_stopped:
                self._pass("")
            if not character or (yield from self._is_cut(character)):
                return self._missing
            if character == '"':
                self._pass("")
                self._wants_key = False
                if not (yield from read_string(text, self._emit)):
                    return '"' + self._missing
                self._closed = True
                continue
            text.take(1)
            if character in "}]":
                if self._close(character):
                    return ""
            elif character in "{[":
                self._open(character)
            elif character == ",":
                self._pass("")
                self._held, self._closed = character, False
                self._wants_key = self._due[-1] == "}"
            else:
                self._pass(character)

    @property
    def _missing(self) -> str:
        return "".join(reversed(self._due))

    def _is_cut(self, character: str) -> Reading[bool]:
        """Return whether the call ends here: at a marker, even a damaged one, or at an object where only a key is
        possible.
        """
        if (yield from self._text.sees(self._stops)) is not None:
            return True
        if character == "<":
            tag = yield from self._text.tag()
            return any(is_closer(tag, stop) for stop in self._stops)
        return character == "{" and self._wants_key

    def _pass(self, piece: str) -> None:
        if self._closed:
            junk, colon, rest = piece.partition(":")
            piece = _NEVER_AFTER_A_CLOSER.sub("", junk) + colon + rest
            self._closed = not colon
        if self._held and piece.isspace():
            self._held += piece
            return
        text = self._held + piece
        self._held = ""
        if text:
            self._emit(text)

    def _open(self, bracket: str) -> None:
        self._pass(bracket)
        self._due.append(_CLOSER[bracket])
        self._count[_CLOSER[bracket]] += 1
        self._wants_key = self._closed = False

    def _close(self, bracket: str) -> bool:
        """Close brackets up to the partner of this one; True if that closes the value."""
        if not self._count[bracket]:
            return False
        self._held, self._wants_key = "", False
        while True:
            due = self._due.pop()
            self._count[due] -= 1
            self._emit(due)
            if due == bracket:
                self._closed = True
                return not self._due


def skip_value(text: IncomingText, stops: Sequence[str]) -> Reading[bool]:
    """Skip any value. False if it is truncated or missing."""
    character = yield from text.peek()
    if character == '"':
        return (yield from read_string(text, dropped))
    if character and character in "{[":
        return not (yield from JsonValue(text, dropped, stops).read())
    return bool((yield from text.word(LITERAL)))
