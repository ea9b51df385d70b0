"""Reads JSON as models write it, and passes it on as valid JSON: an object or a list with all its brackets, a string.

Values are passed on as they arrive. Knows nothing of calls, except for the texts that end one.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from engine.frontend.text.incoming_text import Emit, IncomingText, Reading, dropped
from engine.frontend.text.tools.closing_quotes import MOST_AHEAD, ClosingQuote
from engine.frontend.text.tools.closing_tags import is_closer


def is_object(written: str) -> bool:
    try:
        return isinstance(json.loads(written, parse_constant=refuse_constant), dict)
    except (ValueError, RecursionError):
        return False


def keys_of(written: str) -> frozenset[str]:
    """Return the keys of an object in JSON; none if a text is no object."""
    return frozenset(json.loads(written)) if is_object(written) else frozenset()


def refuse_constant(word: str) -> Any:
    """Refuse NaN and the infinities, which Python accepts but JSON lacks."""
    raise ValueError(f"{word} is not JSON")


def escaped(text: str) -> str:
    """Escape a text for a JSON string. Pieces can be escaped separately."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


SPACE = re.compile(r"\s*")
# Text in quotes up to the next escape, by the kind of quote.
PLAIN = {"'": re.compile(r"[^'\\]*"), '"': re.compile(r'[^"\\]*')}
QUOTES = frozenset(PLAIN)
_SIMPLE_ESCAPES = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")
# A number or a word.
LITERAL = re.compile(r"[\w.+-]*")


def read_string(text: IncomingText, emit: Emit, closing: ClosingQuote | None = None) -> Reading[bool]:
    """Read a string at this position, in quotes of either kind. False if the text ended inside.

    Control characters, backslashes and quotes that JSON does not allow in a string are escaped. Any quote of its kind
    closes the string, unless ``closing`` judges it.
    """
    quote = text.take(1)
    emit('"')

    def add(piece: str) -> None:
        emit(escaped(piece))
        if closing is not None:
            closing.see(piece)

    is_tripled = closing is not None and (yield from text.judged(closing.is_tripled, MOST_AHEAD))
    text.take(2 * bool(is_tripled))
    while True:
        yield from text.run(PLAIN[quote], add)
        character = yield from text.peek()
        if not character:
            return False
        text.take(1)
        if character != quote:
            if not (yield from _read_json_escape(text, emit)):
                return False
        elif closing is None or (yield from text.judged(closing.closes, MOST_AHEAD)):
            while is_tripled and (yield from text.peek()) == quote:
                text.take(1)
            emit('"')
            return True
        else:
            emit(escaped(character))


def _read_json_escape(text: IncomingText, emit: Emit) -> Reading[bool]:
    """Read what follows a backslash; one that escapes nothing is literal. False if the text ended inside."""
    character = yield from text.peek()
    if not character:
        return False
    if character in _SIMPLE_ESCAPES:
        emit("\\" + text.take(1))
        return True
    if character == "'":
        emit(text.take(1))
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


_BETWEEN_BRACKETS = re.compile(r"""[^"'{}\[\],<;`/#]*""")
# What may begin a comment, and comments.
_SIGNS = frozenset("/#")
_SLASHES = re.compile(r"[/#]*")
_COMMENTS: Final = ("//", "/*", "#")
# Where a value may be, a number sign is more often its first character.
_COMMENTS_BEFORE_VALUES: Final = ("//", "/*", "# ")
# Numbers as Python has them.
_DIGITS: Final = r"[0-9](?:_?[0-9])*"
_NUMBER = re.compile(rf"([+-]?)(0|(?!0){_DIGITS})?(?:\.((?:{_DIGITS})?))?([eE][+-]?[0-9]+)?")
_BARE_KEY = re.compile(r"^(\s*)([A-Za-z_][\w-]*)(?=\s*:)")
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
# Models write them where JSON has true, false and null.
_PYTHON_WORD = re.compile(r"\b(?:True|False|None)\b")
_NEVER_AFTER_A_CLOSER = re.compile(r"[^\s{\[]")
# What may be between the last value of a call and its end, and a tag.
_AFTER_VALUES: Final = " \t\r\n}]"
_TAG = re.compile(r"<[^<>\n]{0,48}>?")
_CLOSER = {"{": "}", "[": "]"}


def skip_comment(text: IncomingText, stops: Sequence[str]) -> Reading[bool]:
    """Skip a comment at this position, up to its end or a marker. False if there is none."""
    begin = yield from text.sees(_COMMENTS)
    if begin is None:
        return False
    text.take(len(begin))
    end = "*/" if begin == "/*" else "\n"
    found = yield from text.until((end, *_markers_in(stops)), dropped)
    text.step_back(len(found) if found not in (None, "*/") else 0)
    return True


class _Next(enum.Enum):
    """Possible next parts of a value."""

    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA = enum.auto()


_SEMICOLON: Final = ";"
_BEFORE_STRINGS: Final = (_Next.KEY, _Next.VALUE)


class JsonValue:
    """Reads an object or a list at this position, and passes it on with all brackets closed in order.

    ``stops`` end a call, and cut a value whose brackets do not close. ``enclosing`` is the number of objects around the
    value. Omits brackets that close nothing, commas before a closing bracket, and words right after a string or a
    bracket. Adds missing commas, writes Python's words and quotes as JSON's, and quotes keys.
    """

    def __init__(self, text: IncomingText, emit: Emit, stops: Sequence[str], *, enclosing: int = 0) -> None:
        self._text = text
        self._emit = emit
        self._stops = stops
        self._markers = _markers_in(stops)
        self._enclosing = enclosing
        # The expected closing brackets, and the number of each kind.
        self._due: list[str] = []
        self._count = {"}": 0, "]": 0}
        # A comma and the space after it, until something follows.
        self._held = ""
        self._wants_key = False
        # True right after a string or a bracket was closed, when no word can follow.
        self._closed = False
        self._next = _Next.VALUE

    def read(self) -> Reading[str]:
        """Read the value and return the closers that it lacks, none for a complete one."""
        text = self._text
        while True:
            between = yield from text.word(_BETWEEN_BRACKETS)
            while (yield from text.peek()) in _SIGNS and not (yield from self._sees_comment(between)):
                between += (yield from text.word(_SLASHES)) + (yield from text.word(_BETWEEN_BRACKETS))
            character = yield from text.peek()
            if between:
                self._pass_words(between, is_whole=character in "}],;/#" if character else text.has_stopped)
            if not character and not text.has_stopped:
                self._pass("")
            if not character or (yield from self._is_cut(character)):
                return self._missing
            if character == '"' and self._next is _Next.COMMA and (yield from self._is_stray()):
                text.take(1)
                continue
            if character == '"' or (character == "'" and self._next in _BEFORE_STRINGS):
                if not (yield from self._read_string(character)):
                    return '"' + self._missing
                continue
            if character in _SIGNS:
                yield from skip_comment(text, self._stops)
                continue
            text.take(1)
            if character in "}]":
                if self._close(character):
                    return ""
            elif character in "{[":
                self._open(character)
            elif character in ",;":
                self._separate()
            else:
                self._pass(character)

    def _sees_comment(self, between: str) -> Reading[bool]:
        """Return whether a comment is at this position; where a value may be, a number sign is one before a space."""
        is_apart = not between or between[-1].isspace()
        is_value = self._next is _Next.VALUE or between.rstrip().endswith(":")
        comments = _COMMENTS_BEFORE_VALUES if is_value else _COMMENTS
        return is_apart and (yield from self._text.sees(comments)) is not None

    def _pass_words(self, between: str, *, is_whole: bool) -> None:
        """Pass on what is not in quotes: numbers, words, a colon, a key without quotes.

        ``is_whole``: a value among them has ended, so that one that is no JSON is a text.
        """
        if self._next is _Next.KEY:
            between = _BARE_KEY.sub(r'\1"\2"', between)
        before, colon, after = ("", "", between) if self._next is _Next.VALUE else between.partition(":")
        if is_whole and (colon or self._next is _Next.VALUE) and (word := after.strip()):
            after = after.replace(word, _json_of_word(word))
        between = before + colon + after
        self._pass(_PYTHON_WORD.sub(lambda found: PYTHON_WORDS[found[0]], between))
        self._wants_key = self._wants_key and not colon
        if after.strip():
            self._next = _Next.COMMA
        elif colon:
            self._next = _Next.VALUE

    def _read_string(self, quote: str) -> Reading[bool]:
        """Read a key or a string. One that follows another value lacks its comma."""
        is_key = self._due[-1] == "}" and self._next in (_Next.KEY, _Next.COMMA)
        if self._next is _Next.COMMA:
            self._held = ","
        self._pass("")
        self._wants_key = False
        closing = None if is_key else ClosingQuote(quote, self._due, enclosing=self._enclosing, stops=self._markers)
        whole = yield from read_string(self._text, self._emit, closing)
        self._closed = whole
        self._next = _Next.COLON if is_key else _Next.COMMA
        return whole

    def _is_stray(self) -> Reading[bool]:
        """Return whether a quote after a value stands for a bracket: only brackets come before the call ends."""

        def judged(ahead: str, more: bool) -> bool | None:
            after = ahead[1:].lstrip(_AFTER_VALUES)
            tag = _TAG.match(after)
            if more and (not after or (tag and tag.end() == len(after)) or any(m.startswith(after) for m in markers)):
                return None
            if not after or after.startswith(markers):
                return True
            return tag is not None and any(is_closer(tag[0], marker, markers) for marker in markers)

        # Texts begin with a semicolon, too.
        markers = tuple(stop for stop in self._stops if stop != _SEMICOLON)
        return bool((yield from self._text.judged(judged, MOST_AHEAD)))

    def _separate(self) -> None:
        """Hold a comma back until something follows it. A semicolon is one that was written wrong.

        One in an object that no entry precedes separates nothing; in a list, an item may be missing before it.
        """
        if self._next is _Next.KEY:
            return
        self._pass("")
        self._held, self._closed = ",", False
        self._wants_key = self._due[-1] == "}"
        self._next = _Next.KEY if self._wants_key else _Next.VALUE

    @property
    def _missing(self) -> str:
        return "".join(reversed(self._due))

    def _is_cut(self, character: str) -> Reading[bool]:
        """Return whether the call ends here: at a marker, even a damaged one, or at an object where only a key is
        possible.
        """
        stop = yield from self._text.sees(self._stops)
        if stop is not None:
            return stop != _SEMICOLON or bool((yield from self._text.judged(_separates_calls, MOST_AHEAD)))
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
        if self._next is _Next.COMMA and self._due[-1] == "]":
            self._held = ","
        self._pass(bracket)
        self._due.append(_CLOSER[bracket])
        self._count[_CLOSER[bracket]] += 1
        self._wants_key = self._closed = False
        self._next = _Next.KEY if bracket == "{" else _Next.VALUE

    def _close(self, bracket: str) -> bool:
        """Close brackets up to the partner of this one; True if that closes the value."""
        if not self._count[bracket]:
            return False
        self._held, self._wants_key = "", False
        self._next = _Next.COMMA
        while True:
            due = self._due.pop()
            self._count[due] -= 1
            self._emit(due)
            if due == bracket:
                self._closed = True
                return not self._due


def mended(written: str) -> str:
    """Return the JSON of a complete object or list, as far as it can be read."""
    text, found = IncomingText(), list[str]()
    text.feed(written)
    text.end(stopped=True)
    for _ in JsonValue(text, found.append, ()).read():
        continue
    return "".join(found)


def _separates_calls(ahead: str, more: bool) -> bool | None:
    """Return whether a semicolon is between calls, rather than in place of a comma."""
    after = ahead[1:].lstrip()
    if not after:
        return None if more else True
    return after[0] not in "\"'}]-0123456789"


def read_value(text: IncomingText, stops: Sequence[str], *, enclosing: int) -> Reading[str | None]:
    """Read any value of an object, and return its JSON; None if it is missing, or was cut by the end of the text.

    ``enclosing`` is the number of objects around the value. A word that is no value is a string without its quotes.
    """
    written: list[str] = []
    character = yield from text.peek()
    if character and character in QUOTES:
        closing = ClosingQuote(character, "}", enclosing=enclosing - 1, stops=_markers_in(stops))
        whole = yield from read_string(text, written.append, closing)
        return "".join(written) if whole else None
    if character and character in "{[":
        missing = yield from JsonValue(text, written.append, stops, enclosing=enclosing).read()
        is_whole = not missing or text.has_stopped or (yield from text.peek())
        return "".join(written) + missing if is_whole else None
    word = yield from text.word(LITERAL)
    return _json_of_word(word) if word else None


def _json_of_word(word: str) -> str:
    """Return the JSON of a word: of a number or a constant as Python has them, or else of a text."""
    try:
        json.loads(word, parse_constant=refuse_constant)
    except ValueError:
        return json_of_number(word) or PYTHON_WORDS.get(word) or f'"{escaped(word)}"'
    return word


def json_of_number(word: str) -> str:
    """Return the JSON of a number as Python has it; empty for any other word."""
    found = _NUMBER.fullmatch(word)
    if found is None or not (found[2] or found[3]):
        return ""
    whole, fraction = (digits.replace("_", "") for digits in (found[2] or "0", found[3] or ""))
    return f"{found[1].strip('+')}{whole}{'.' * bool(fraction)}{fraction}{found[4] or ''}"


def _markers_in(stops: Sequence[str]) -> tuple[str, ...]:
    """Return the stops that no text has: fences and semicolons occur in texts."""
    return tuple(stop for stop in stops if stop[0] in "<[")
