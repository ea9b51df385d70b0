"""What every family's parser finds calls with: their parts as they come out, calls as JSON objects, values.

Owns what is held back until it is known whether it belongs to a call, when an object is a call (its name is known and
its arguments begin), what a value without quotes is (a text where the tool's schema allows nothing else, JSON where it
reads as such), which tag closes one, and Python's literals. Values are passed on as they arrive.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from engine.frontend.text.incoming_text import Emit, IncomingText, Reading, dropped
from engine.frontend.text.reasoning import CallArguments, CallBegun, CallEnded, Content, Part, appended

# The schemas of a tool's arguments by their names.
Properties = Mapping[str, Mapping[str, Any]]


class CallParts:
    """Adds what is certain to ``parts``."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._space = ""
        self._said = False
        self._called = False

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
# What stands between quotes up to the next escape, by the quote.
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
_UNSTRUCTURED = re.compile(r'[^"{}\[\]<]*')
# A number or a word.
LITERAL = re.compile(r"[\w.+-]*")
# Models write line feeds into strings where JSON wants them escaped.
_decode_string = json.JSONDecoder(strict=False).decode


def read_string(text: IncomingText, emit: Emit) -> Reading[bool]:
    """Read a string, which begins here, with its quotes. False when the text ended inside."""
    emit(text.take(1))
    while True:
        yield from text.run(_PLAIN['"'], emit)
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
