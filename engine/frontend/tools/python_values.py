"""Python's literals as a model writes them, read as they arrive and passed on as JSON.

Owns where a literal ends and how its strings are escaped. JSON's own words and escapes are read as well.
"""

from __future__ import annotations

import json
import re
from typing import Final

from engine.frontend.incoming_text import Emit, IncomingText, Reading
from engine.frontend.tools.argument_values import escaped
from engine.frontend.tools.json_text import SPACE, read_literal

__all__ = ["read_python_value"]

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
    found = _literal((yield from read_literal(text)))
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
    emit(escaped(_ESCAPES[character] if character in _ESCAPES else _itself(character)))
    return True


def _itself(character: str) -> str:
    return character if character in "\\'\"" else "\\" + character


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
