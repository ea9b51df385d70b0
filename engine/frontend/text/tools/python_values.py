"""Reads Python literals as models write them, and passes them on as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Final

from engine.frontend.text.incoming_text import Emit, IncomingText, Reading
from engine.frontend.text.tools.json_values import LITERAL, PLAIN, PYTHON_WORDS, QUOTES, SPACE, escaped

DEPTH_LIMIT: Final = 64
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/"}
# The number of hexadecimal digits that follow.
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}

_SIGNS_OF_NUMBERS: Final = "0123456789+-."
# The prefixes of strings that have a value as they are written.
_PREFIXES = frozenset("rRuUbB")
# Returns whether the call ends at this position.
Ends = Callable[[], Reading[bool]]
_CLOSERS = frozenset(_CLOSING.values())
_COMMAS = re.compile(r"[\s,]*")
_LAST_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def read_python_value(text: IncomingText, emit: Emit, ends: Ends, depth: int = 0) -> Reading[bool]:
    """Read a Python literal and emit it as JSON. False if it is invalid or truncated.

    Brackets that are missing where the call ``ends`` are added.
    """
    character = yield from text.peek()
    if character in PLAIN:
        return (yield from _read_string(text, emit))
    if character in _CLOSING:
        return depth < DEPTH_LIMIT and (yield from _read_items(text, emit, ends, depth + 1))
    word = yield from text.word(LITERAL)
    if word in _PREFIXES and (yield from text.peek()) in QUOTES:
        return (yield from _read_string(text, emit, raw=word in "rR"))
    found = _literal(word)
    if found is None and word and word[0] in _SIGNS_OF_NUMBERS and (text.has_stopped or (yield from text.peek())):
        # What only begins like a number, such as a date, is a text.
        found = f'"{escaped(word)}"'
    emit(found or "")
    return found is not None


def _read_items(text: IncomingText, emit: Emit, ends: Ends, depth: int) -> Reading[bool]:
    """Read a list, a dict or a tuple, which becomes a list."""
    opening = text.take(1)
    closing, is_dict = _CLOSING[opening], opening == "{"
    emit("{" if is_dict else "[")
    is_first = True
    while True:
        # A comma without an entry before it separates nothing in a dict; in a list, an item may be missing.
        yield from text.run(_COMMAS if is_dict else SPACE)
        character = yield from text.peek()
        if character in _CLOSERS or (yield from ends()):
            # Another bracket closes the value around this one.
            text.take(int(character == closing))
            emit("}" if is_dict else "]")
            return True
        if not character:
            return False
        if not is_first:
            if (yield from _sees_call(text)):
                emit("}" if is_dict else "]")
                return True
            emit(", ")
        is_first = False
        if is_dict and not (yield from _read_key(text, emit)):
            return False
        if not (yield from read_python_value(text, emit, ends, depth)):
            return False
        yield from text.run(SPACE)
        character = yield from text.peek()
        if character == ",":
            text.take(1)
        elif character and character not in _CLOSERS and not (yield from ends()):
            return False


def _sees_call(text: IncomingText) -> Reading[bool]:
    """Return whether a call begins instead of an item, because the brackets before it are missing."""
    text.mark()
    name = yield from text.word(LITERAL)
    sees = bool(name) and (yield from text.peek()) == "("
    text.rewind()
    return sees


def _read_key(text: IncomingText, emit: Emit) -> Reading[bool]:
    """Read a key and its colon. JSON keys are strings."""
    if (yield from text.peek()) not in PLAIN or not (yield from _read_string(text, emit)):
        return False
    yield from text.run(SPACE)
    if (yield from text.peek()) != ":":
        return False
    text.take(1)
    emit(": ")
    yield from text.run(SPACE)
    return True


def _read_string(text: IncomingText, emit: Emit, *, raw: bool = False) -> Reading[bool]:
    """Read a string, and those right after it, which Python joins."""
    emit('"')
    while True:
        whole = yield from _read_quoted(text, emit, raw=raw)
        text.mark()
        yield from text.run(SPACE)
        if not whole or (yield from text.peek()) not in QUOTES:
            break
    text.rewind()
    if whole or text.has_stopped:
        emit('"')
    return whole or text.has_stopped


def _read_quoted(text: IncomingText, emit: Emit, *, raw: bool) -> Reading[bool]:
    """Read the text between two quotes of one kind, or between two times three. False if it was cut."""
    quote = text.take(1)
    end = quote
    if (yield from text.peek()) == quote:
        text.take(1)
        if (yield from text.peek()) != quote:
            return True
        text.take(1)
        end = quote * 3
    while True:
        yield from text.run(PLAIN[quote], lambda piece: emit(escaped(piece)))
        character = yield from text.peek()
        if not character:
            return False
        if (yield from text.marker((end,))) is not None:
            return True
        text.take(1)
        if character == quote:
            emit(escaped(character))
        elif raw:
            emit(escaped(character + text.take(len((yield from text.peek())))))
        elif not (yield from _read_escape(text, emit)):
            return False


def _read_escape(text: IncomingText, emit: Emit) -> Reading[bool]:
    """Read an escape; a backslash before any other character is literal."""
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
        emit(f"\\u{digits}")  # Possibly half of a surrogate pair, which only JSON can express.
    elif code > _LAST_CODE or code in _SURROGATES:
        return False
    else:
        emit(escaped(chr(code)))
    return True


def _literal(word: str) -> str | None:
    """Convert a word or number to JSON; None for anything else."""
    if word in PYTHON_WORDS:
        return PYTHON_WORDS[word]
    if _NUMBER.fullmatch(word):
        return word
    for base in (0, 10):
        try:
            return json.dumps(int(word, base))
        except ValueError:
            pass
    try:
        return json.dumps(float(word), allow_nan=False)
    except ValueError:
        return None
