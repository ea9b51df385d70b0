"""JSON as a model writes it: read as it arrives and passed on as it is, valid or not.

Owns where a string and a value end. Never waits for the end of a value before it passes its beginning on, and never
takes for the end of a call what stands inside a string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from engine.frontend.incoming_text import Emit, IncomingText, Reading, dropped

__all__ = ["SPACE", "decoded_string", "read_literal", "read_string", "read_value", "skip_value"]

SPACE = re.compile(r"\s*")
_PLAIN = re.compile(r'[^"\\]*')
_UNSTRUCTURED = re.compile(r'[^"{}\[\]<]*')
_LITERAL = re.compile(r"[\w.+-]*")
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


def decoded_string(written: str) -> str | None:
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


def read_literal(text: IncomingText) -> Reading[str]:
    """Read a number or a word; empty when none stands here."""
    found: list[str] = []
    yield from text.run(_LITERAL, found.append)
    return "".join(found)


def skip_value(text: IncomingText, stops: Sequence[str]) -> Reading[bool]:
    """Read any value and drop it. False when it was cut, or none stands here."""
    character = yield from text.peek()
    if character == '"':
        return (yield from read_string(text, dropped))
    if character and character in "{[":
        return (yield from read_value(text, dropped, stops))
    return bool((yield from read_literal(text)))
