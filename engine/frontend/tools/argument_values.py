"""Values of arguments as models write them where a format is no JSON, and the JSON that clients get of them.

Owns what a value without quotes is (a text where the tool's schema allows nothing else, JSON where it reads as such),
which tag closes one, and Python's literals. Values are passed on as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from engine.frontend.incoming_text import Emit, IncomingText, Reading
from engine.frontend.tools.call_parser import LITERAL, SPACE, CallParts

_TYPES = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",)}


class WrittenArguments:
    """The arguments of one call, which become an object in JSON one after the other."""

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self._begun = False

    def key(self, key: str) -> None:
        """Begin an argument; its value is told to ``add``."""
        self._parts.argue(f'{", " if self._begun else "{"}"{escaped(key)}": ')
        self._begun = True

    def add(self, text: str) -> None:
        self._parts.argue(text)

    def end(self) -> None:
        self._parts.argue("}" if self._begun else "{}")
        self._parts.end()


def properties_of(parameters: Mapping[str, Any] | None) -> dict[str, dict[str, Any]]:
    """The schemas of a tool's arguments by their names, as far as its schema has them in plain sight."""
    found = (parameters or {}).get("properties")
    if not isinstance(found, dict):
        return {}
    return {name: schema if isinstance(schema, dict) else {} for name, schema in found.items()}


def is_text(schema: Mapping[str, Any]) -> bool:
    """Whether a value of this schema can be nothing but a text, which is then written without quotes."""
    choices = schema.get("enum")
    if isinstance(choices, list):
        return bool(choices) and all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string"


def escaped(text: str) -> str:
    """A text as it stands in a JSON string. Pieces can be escaped one by one."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def json_of(written: str, schema: Mapping[str, Any]) -> str:
    """The JSON of a whole value. What is none, or is not of the schema's type while a text is, is a text."""
    stripped = written.strip()
    stripped = _WORDS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{escaped(written)}"'
    return stripped if _fits(value, schema) else f'"{escaped(written)}"'


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """True as well for a value of a wrong type where a text would be one too."""
    types = schema.get("type")
    types = [types] if isinstance(types, str) else types
    if not isinstance(types, list) or "string" not in types:
        return True
    return any(name in types for name in (("null",) if value is None else _TYPES.get(type(value), ("object",))))


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON")


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


DEPTH_LIMIT: Final = 64
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/"}
# How many hexadecimal digits follow.
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_LAST_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def read_python_value(text: IncomingText, emit: Emit, depth: int = 0) -> Reading[bool]:
    """Read a literal, which begins here, and pass it on as JSON. False when it is none, or was cut."""
    character = yield from text.peek()
    if character in _PLAIN:
        return (yield from _read_string(text, emit))
    if character in _CLOSING:
        return depth < DEPTH_LIMIT and (yield from _read_items(text, emit, depth + 1))
    found = _literal((yield from text.word(LITERAL)))
    emit(found or "")
    return found is not None


def _read_items(text: IncomingText, emit: Emit, depth: int) -> Reading[bool]:
    """A list, a tuple, which is a list too, or a dict."""
    opening = text.take(1)
    closing, is_dict = _CLOSING[opening], opening == "{"
    emit("{" if is_dict else "[")
    is_first = True
    while True:
        yield from text.run(SPACE)
        character = yield from text.peek()
        if character == closing:
            text.take(1)
            emit("}" if is_dict else "]")
            return True
        if not is_first:
            emit(", ")
        is_first = False
        if is_dict and not (yield from _read_key(text, emit)):
            return False
        if not (yield from read_python_value(text, emit, depth)):
            return False
        yield from text.run(SPACE)
        character = yield from text.peek()
        if character == ",":
            text.take(1)
        elif character != closing:
            return False


def _read_key(text: IncomingText, emit: Emit) -> Reading[bool]:
    """A key and its colon. JSON has no keys but strings."""
    if (yield from text.peek()) not in _PLAIN or not (yield from _read_string(text, emit)):
        return False
    yield from text.run(SPACE)
    if (yield from text.peek()) != ":":
        return False
    text.take(1)
    emit(": ")
    yield from text.run(SPACE)
    return True


def _read_string(text: IncomingText, emit: Emit) -> Reading[bool]:
    quote = text.take(1)
    emit('"')
    while True:
        yield from text.run(_PLAIN[quote], lambda piece: emit(escaped(piece)))
        character = yield from text.peek()
        if not character:
            return False
        text.take(1)
        if character == quote:
            emit('"')
            return True
        if not (yield from _read_escape(text, emit)):
            return False


def _read_escape(text: IncomingText, emit: Emit) -> Reading[bool]:
    """What follows a backslash; one that means nothing stands for itself."""
    character = yield from text.peek()
    if not character:
        return False
    text.take(1)
    if character in _CODES:
        return (yield from _read_code(text, emit, character))
    itself = character if character in "\\'\"" else "\\" + character
    emit(escaped(_ESCAPES.get(character, itself)))
    return True


def _read_code(text: IncomingText, emit: Emit, kind: str) -> Reading[bool]:
    digits = ""
    while len(digits) < _CODES[kind]:
        character = yield from text.peek()
        if not character or character not in "0123456789abcdefABCDEF":
            return False
        digits += text.take(1)
    code = int(digits, 16)
    if kind == "u":
        emit(f"\\u{digits}")  # Perhaps half of a pair, which only JSON can write.
    elif code > _LAST_CODE or code in _SURROGATES:
        return False
    else:
        emit(escaped(chr(code)))
    return True


def _literal(word: str) -> str | None:
    """A word or a number as JSON; None for what is neither."""
    if word in _WORDS:
        return _WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    try:
        return json.dumps(int(word, 0))
    except ValueError:
        pass
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        return None
