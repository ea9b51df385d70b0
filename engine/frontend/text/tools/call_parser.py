"""Reads calls written as JSON objects, JSON values and Python literals, for the parsers of all families.

Owns the parts of an output, the point at which an object becomes a call (its name is known and its arguments begin),
and the closing brackets that a value lacks. Values are passed on as they arrive, and a call ends only with arguments
that are a JSON object.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from engine.frontend.text.incoming_text import Emit, IncomingText, Reading, dropped
from engine.frontend.text.reasoning import CallArguments, CallBegun, CallEnded, Content, Part, appended
from engine.frontend.text.tools.closing_tags import is_closer
from engine.grammar.followable import FORMATS

# The schemas of a tool's arguments, by name.
Properties = Mapping[str, Mapping[str, Any]]


class CallParts:
    """Collects the parts of an output."""

    def __init__(self, parts: list[Part]) -> None:
        self._parts = parts
        self._arguments: list[str] = []
        self._space = ""
        self._said = False
        self._called = False

    def say(self, text: str) -> None:
        """Add content. Trailing whitespace is held back until more follows."""
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
        self._arguments.clear()
        self._parts.append(CallBegun(name, call_id))

    def argue(self, text: str) -> None:
        self._arguments.append(text)
        appended(self._parts, CallArguments(text))

    def give(self, arguments: str) -> None:
        """Add the whole arguments and the end of the call."""
        self.argue(arguments)
        self.end()

    def end(self, missing: str = "") -> None:
        """Add the ``missing`` closers, and the end of the call if the arguments are then a JSON object."""
        if is_object("".join(self._arguments) + missing):
            self.argue(missing)
            self._parts.append(CallEnded())

    def close(self) -> None:
        """End the text; trailing whitespace is content if there was no call."""
        if not self._called:
            appended(self._parts, Content(self._space))


def is_object(written: str) -> bool:
    try:
        return isinstance(json.loads(written, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def refuse_constant(word: str) -> Any:
    """Refuse NaN and the infinities, which Python accepts but JSON lacks."""
    raise ValueError(f"{word} is not JSON")


SPACE = re.compile(r"\s*")
# Text in quotes up to the next escape, by the kind of quote.
_PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
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
        yield from text.run(_PLAIN['"'], lambda piece: emit(_CONTROLS.sub(lambda found: escaped(found[0]), piece)))
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


def _decoded(written: str) -> str | None:
    """Decode a quoted string; None if it is not JSON or has half of a surrogate pair."""
    try:
        value = str(_decode_string(written))
        value.encode()
    except ValueError:
        return None
    return value


_BETWEEN_BRACKETS = re.compile(r'[^"{}\[\],<;`]*')
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


def read_arguments(text: IncomingText, parts: CallParts, stops: Sequence[str]) -> Reading[bool]:
    """Read the object of a call that has begun, and end the call; False if the object was cut.

    Closing brackets that the model forgot are added, unless the text was cut.
    """
    missing = yield from JsonValue(text, parts.argue, stops).read()
    if not missing or text.has_stopped or (yield from text.peek()):
        parts.end(missing)
    return not missing


def read_other_arguments(text: IncomingText) -> Reading[str]:
    """Read arguments that do not begin as an object: an object in a string, or null. Empty for anything else."""
    if (yield from text.peek()) == '"':
        written: list[str] = []
        whole = yield from read_string(text, written.append)
        said = _decoded("".join(written)) if whole else None
        return said if said is not None and is_object(said) else ""
    return NO_ARGUMENTS if (yield from text.word(LITERAL)) == "null" else ""


NO_ARGUMENTS: Final = "{}"
NAME: Final = "name"
# The function's name, or the whole call in the form of requests.
FUNCTION: Final = "function"
ARGUMENTS: Final = ("arguments", "parameters")
# The keys of a call without a marker. An object with any other key is content in JSON.
KEYS_OF_A_BARE_CALL: Final = frozenset((NAME, FUNCTION, *ARGUMENTS, "type", "id"))
_COMMAS = re.compile(r"[\s,]*")


class CallObject:
    """Reads an object that may be a call. With ``tools`` it must name one of them and have only the keys of a call."""

    def __init__(
        self,
        text: IncomingText,
        parts: CallParts,
        stops: Sequence[str],
        tools: Collection[str] | None,
        *,
        is_inner: bool = False,
    ) -> None:
        self._text = text
        self._parts = parts
        self._is_inner = is_inner
        self._stops = stops
        self._tools = tools
        self._name: str | None = None
        self._arguments: str | None = None
        self._begun = False

    def read(self) -> Reading[bool]:
        """Return True for a call, even a truncated one; False, with nothing emitted, if it is not a call."""
        text = self._text
        text.take(1)
        yield from text.run(SPACE)
        # Small models copy the doubled braces of a template.
        text.take(int((yield from text.peek()) == "{"))
        while True:
            yield from text.run(_COMMAS)
            character = yield from text.peek()
            if character == "}":
                text.take(1)
                return self._close()
            if character != '"' or not (yield from self._read_entry()):
                return self._begun

    def _close(self) -> bool:
        """Complete the object; a call without arguments gets an empty object."""
        if self._name is not None and not self._begun:
            self._give(NO_ARGUMENTS)
        return self._begun

    def _read_entry(self) -> Reading[bool]:
        """Read a key and its value; False if the object cannot be read further or is not a call."""
        text = self._text
        key = yield from self._read_text()
        yield from text.run(SPACE)
        if key is None or (yield from text.peek()) != ":":
            return False
        text.take(1)
        yield from text.run(SPACE)
        if self._tools is not None and key not in KEYS_OF_A_BARE_CALL:
            return False
        wraps = key == FUNCTION and not self._is_inner and (yield from text.peek()) == "{"
        if wraps and self._name is None and self._arguments is None and not self._begun:
            self._begun = yield from CallObject(text, self._parts, self._stops, self._tools, is_inner=True).read()
            return self._begun
        if key in (NAME, FUNCTION) and self._name is None and not self._begun:
            return (yield from self._read_name())
        if key in ARGUMENTS and self._arguments is None and not self._begun:
            return (yield from self._read_arguments())
        return (yield from skip_value(text, self._stops))

    def _read_text(self) -> Reading[str | None]:
        """Read and decode a string; None if there is none."""
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
        """Emit an object as it arrives, or keep it until the name is known."""
        if self._name is None:
            kept: list[str] = []
            if (yield from JsonValue(self._text, kept.append, self._stops).read()):
                return False
            self._arguments = "".join(kept)
            return True
        self._begin(self._name)
        return (yield from read_arguments(self._text, self._parts, self._stops))

    def _give(self, arguments: str) -> None:
        """Emit all arguments, or keep them until the name is known."""
        if self._name is None:
            self._arguments = arguments
            return
        self._begin(self._name)
        self._parts.give(arguments)

    def _begin(self, name: str) -> None:
        self._begun = True
        self._text.unmark()
        self._parts.begin(name)


def choices_of(schema: Mapping[str, Any]) -> list[Any]:
    """Return the values of a schema that lists them; else none."""
    choices = [schema["const"]] if "const" in schema else schema.get("enum")
    return choices if isinstance(choices, list) else []


def is_text(schema: Mapping[str, Any]) -> bool:
    """Return whether values of a schema are always strings, and written without quotes.

    Only JSON can keep to a pattern or a format.
    """
    if "enum" in schema or "const" in schema:
        choices = choices_of(schema)
        return bool(choices) and all(isinstance(choice, str) for choice in choices)
    return schema.get("type") == "string" and "pattern" not in schema and schema.get("format") not in FORMATS


def escaped(text: str) -> str:
    """Escape a text for a JSON string. Pieces can be escaped separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


DEPTH_LIMIT: Final = 64
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\n": "", "/": "/"}
# The number of hexadecimal digits that follow.
_CODES = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_QUOTES = frozenset(_PLAIN)
# The prefixes of strings that have a value as they are written.
_PREFIXES = frozenset("rRuUbB")
_CLOSERS = frozenset(_CLOSING.values())
_LAST_CODE = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)


def read_python_value(text: IncomingText, emit: Emit, depth: int = 0) -> Reading[bool]:
    """Read a Python literal and emit it as JSON. False if it is invalid or truncated."""
    character = yield from text.peek()
    if character in _PLAIN:
        return (yield from _read_string(text, emit))
    if character in _CLOSING:
        return depth < DEPTH_LIMIT and (yield from _read_items(text, emit, depth + 1))
    word = yield from text.word(LITERAL)
    if word in _PREFIXES and (yield from text.peek()) in _QUOTES:
        return (yield from _read_string(text, emit, raw=word in "rR"))
    found = _literal(word)
    emit(found or "")
    return found is not None


def _read_items(text: IncomingText, emit: Emit, depth: int) -> Reading[bool]:
    """Read a list, a dict or a tuple, which becomes a list."""
    opening = text.take(1)
    closing, is_dict = _CLOSING[opening], opening == "{"
    emit("{" if is_dict else "[")
    is_first = True
    while True:
        yield from text.run(SPACE)
        character = yield from text.peek()
        if character in _CLOSERS or (not character and text.has_stopped):
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
        if not (yield from read_python_value(text, emit, depth)):
            return False
        yield from text.run(SPACE)
        character = yield from text.peek()
        if character == ",":
            text.take(1)
        elif character and character not in _CLOSERS:
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
    if (yield from text.peek()) not in _PLAIN or not (yield from _read_string(text, emit)):
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
        if not whole or (yield from text.peek()) not in _QUOTES:
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
        yield from text.run(_PLAIN[quote], lambda piece: emit(escaped(piece)))
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
