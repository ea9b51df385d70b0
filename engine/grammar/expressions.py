"""Reads regular expressions with look-aheads and word boundaries into sequences of nodes.

The dialect is ECMA's without backreferences, flags, Unicode properties and look-behinds of several characters. Dialects
differ on what some classes contain: an expression that forbids gets the larger set, any other the smaller one.
"""

from __future__ import annotations

import functools
import re
from dataclasses import dataclass
from typing import Final, TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]
# Every character; the halves of surrogate pairs are none.
ALL: Final[Ranges] = ((0, 0xD7FF), (0xE000, 0x10FFFF))


class UnreadableError(ValueError):
    """Raised for an expression outside the dialect, or beyond a bound."""


@dataclass(frozen=True)
class Chars:
    """One character of a class."""

    ranges: Ranges


@dataclass(frozen=True)
class Choice:
    options: tuple[Nodes, ...]


@dataclass(frozen=True)
class Repeat:
    """``body`` from ``low`` to ``high`` times; None is without limit."""

    body: Nodes
    low: int
    high: int | None


@dataclass(frozen=True)
class Look:
    """A look-ahead: the text that follows begins with ``body``, or does not."""

    body: Nodes
    is_negative: bool


@dataclass(frozen=True)
class Behind:
    """A look-behind: the character before is one of a class, or not one of it."""

    ranges: Ranges
    is_negative: bool


@dataclass(frozen=True)
class Edge:
    """The begin ``^``, the end ``$``, a word boundary ``b``, or none ``B``.

    Dialects differ on words beside a character that is not in ASCII: ``in_doubt`` is taken there.
    """

    kind: str
    in_doubt: bool = False


Node: TypeAlias = Chars | Choice | Repeat | Look | Behind | Edge
Nodes: TypeAlias = tuple[Node, ...]
ANY_TEXT: Final[Nodes] = (Repeat((Chars(ALL),), 0, None),)

_DIGITS: Final[Ranges] = ((0x30, 0x39),)
WORD: Final[Ranges] = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))
NOT_ASCII: Final[Ranges] = ((0x80, ALL[0][1]), ALL[1])
_SPACES: Final[Ranges] = ((9, 13), (32, 32))
# The spaces of any dialect.
_ALL_SPACES: Final[Ranges] = (
    *((9, 13), (0x1C, 0x20), (0x85, 0x85), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)),
    *((0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000), (0xFEFF, 0xFEFF)),
)
_LINE_ENDS: Final[Ranges] = ((10, 10), (13, 13), (0x2028, 0x2029))
_NEWLINE: Final[Ranges] = ((10, 10),)
_CONTROLS: Final = {"n": 10, "r": 13, "t": 9, "f": 12, "v": 11, "0": 0}
_COUNT: Final = re.compile(r"\{(\d{1,4})(,(\d{0,4}))?\}")
_GROUP: Final = re.compile(r"\((?:\?(?:(?P<look><?[=!])|:|P?<(?![=!])[^>]*>))?")
_NUMBER: Final = re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{4})|([0-9a-fA-F]{2})")
_LAST_DIGITS: Final = 0x1F000
_MOST_NESTED: Final = 40
_FIRST_VISIBLE: Final = 0x20
_LONGEST_SHORT_TEXT: Final = 64


@functools.cache
def _all_digits() -> Ranges:
    """Return the decimal digits of all scripts."""
    return union([(code, code) for code in range(_LAST_DIGITS) if chr(code).isdecimal()])


def union(ranges: Ranges | list[tuple[int, int]]) -> Ranges:
    merged: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(merged)


def complement(ranges: Ranges) -> Ranges:
    left, rest = [], union(ranges)
    for low, high in ALL:
        start = low
        for first, last in rest:
            if first <= high and last >= start:
                if first > start:
                    left.append((start, first - 1))
                start = last + 1
        if start <= high:
            left.append((start, high))
    return tuple(left)


def class_text(ranges: Ranges) -> str:
    merged = complement(complement(ranges))
    return "[" + "".join(f"\\x{{{low:x}}}-\\x{{{high:x}}}" for low, high in merged) + "]"


def read(pattern: str, *, forbids: bool) -> Nodes:
    """Return the nodes of an expression. Raises UnreadableError."""
    reader = _Reader(pattern)
    nodes = reader.choice(forbids=forbids, depth=0)
    if reader.at < len(pattern):
        raise UnreadableError("unmatched )")
    return nodes


def short_text(pattern: str) -> str:
    """Return a short text in which an expression matches if no look-around forbids it.

    Empty for one that cannot be read, or that has no short text.
    """
    try:
        return _short_text_of(read(pattern, forbids=False))
    except (UnreadableError, RecursionError):
        return ""


def _short_text_of(nodes: Nodes) -> str:
    text = ""
    for node in nodes:
        if isinstance(node, Chars):
            visible = [max(low, _FIRST_VISIBLE) for low, high in node.ranges if high >= _FIRST_VISIBLE]
            text += chr(visible[0] if visible else node.ranges[0][0]) if node.ranges else ""
        elif isinstance(node, Choice):
            text += min(map(_short_text_of, node.options), key=len)
        elif isinstance(node, Repeat):
            once = _short_text_of(node.body) if node.low else ""
            text += once * min(node.low, _LONGEST_SHORT_TEXT)
        if len(text) > _LONGEST_SHORT_TEXT:
            raise UnreadableError("no short text")
    return text


class _Reader:
    def __init__(self, pattern: str) -> None:
        self._pattern = pattern
        self.at = 0

    def choice(self, *, forbids: bool, depth: int) -> Nodes:
        if depth > _MOST_NESTED:
            raise UnreadableError("groups nested too deeply")
        options: list[Nodes] = []
        nodes: list[Node] = []
        while self.at < len(self._pattern) and self._pattern[self.at] != ")":
            if self._pattern[self.at] == "|":
                self.at += 1
                options.append(tuple(nodes))
                nodes = []
            else:
                nodes.append(self._repeated(self._one(forbids, depth)))
        options.append(tuple(nodes))
        return options[0] if len(options) == 1 else (Choice(tuple(options)),)

    def _one(self, forbids: bool, depth: int) -> Node:
        letter = self._pattern[self.at]
        if letter == "(":
            return self._group(forbids, depth)
        self.at += 1
        if letter in "^$":
            return Edge(letter)
        if letter == ".":
            return Chars(complement(_NEWLINE if forbids else _LINE_ENDS))
        if letter == "[":
            return Chars(self._class(forbids))
        if letter == "\\":
            if self._pattern[self.at : self.at + 1] in ("b", "B"):
                self.at += 1
                return Edge(self._pattern[self.at - 1], in_doubt=forbids)
            return Chars(self._escaped(forbids))
        if letter in "*+?":
            raise UnreadableError("nothing to repeat")
        return Chars(((ord(letter), ord(letter)),))

    def _group(self, forbids: bool, depth: int) -> Node:
        found = _GROUP.match(self._pattern, self.at)
        if found is None or self._pattern.startswith("?", found.end()):
            raise UnreadableError("a group of another dialect")
        self.at = found.end()
        look = found["look"] or ""
        is_negative = look.endswith("!")
        body = self.choice(forbids=forbids != is_negative, depth=depth + 1)
        if self.at >= len(self._pattern):
            raise UnreadableError("missing )")
        self.at += 1
        if not look.startswith("<"):
            return Look(body, is_negative) if look else Choice((body,))
        if len(body) != 1 or not isinstance(body[0], Chars):
            raise UnreadableError("a look-behind of several characters")
        return Behind(body[0].ranges, is_negative)

    def _repeated(self, node: Node) -> Node:
        """Return a node with the quantifier that follows it, if any."""
        letter = self._pattern[self.at : self.at + 1]
        low, length = 1, 0
        high: int | None = 1
        if letter and letter in "*+?":
            low, high, length = int(letter == "+"), (1 if letter == "?" else None), 1
        elif found := _COUNT.match(self._pattern, self.at):
            low, length = int(found[1]), len(found[0])
            high = low if found[2] is None else int(found[3]) if found[3] else None
        if not length:
            return node
        self.at += length
        if self._pattern[self.at : self.at + 1] == "?":  # Lazy: the same texts.
            self.at += 1
        if self._pattern[self.at : self.at + 1] in ("*", "+") or (high is not None and high < low):
            raise UnreadableError("a quantifier of another dialect")
        return Repeat((node,), low, high)

    def _class(self, forbids: bool) -> Ranges:
        is_negative = self._pattern[self.at : self.at + 1] == "^"
        self.at += is_negative
        found: list[tuple[int, int]] = []
        while (letter := self._pattern[self.at : self.at + 1]) != "]":
            first = self._member(letter, forbids != is_negative)
            is_range = self._pattern[self.at : self.at + 1] == "-" and self._pattern[self.at + 1 : self.at + 2] != "]"
            if is_range and len(first) == 1 and first[0][0] == first[0][1]:
                self.at += 1
                last = self._member(self._pattern[self.at : self.at + 1], forbids)
                if len(last) != 1 or last[0][0] != last[0][1] or last[0][0] < first[0][0]:
                    raise UnreadableError("not a range")
                first = ((first[0][0], last[0][0]),)
            found += first
        self.at += 1
        return complement(tuple(found)) if is_negative else union(found)

    def _member(self, letter: str, forbids: bool) -> Ranges:
        following = self._pattern[self.at + 1 : self.at + 2]
        if not letter or (letter == "[" and following in (":", "[")) or letter + following in ("&&", "--", "~~"):
            raise UnreadableError("a class of another dialect")
        self.at += 1
        if letter == "\\":
            if following == "b":
                self.at += 1
                return ((8, 8),)
            return self._escaped(forbids)
        return ((ord(letter), ord(letter)),)

    def _escaped(self, forbids: bool) -> Ranges:
        letter = self._pattern[self.at : self.at + 1]
        self.at += 1
        if letter and letter in "dDwWsS":
            return _class_of(letter, forbids)
        if letter in ("x", "u"):
            found = re.compile(r"\{([0-9a-fA-F]{1,6})\}|([0-9a-fA-F]{4})|([0-9a-fA-F]{2})").match(
                self._pattern, self.at
            )
            if found is None or (letter == "u" and found[3]):
                raise UnreadableError("not a character by number")
            digits = found[1] or (found[2] if letter == "u" else self._pattern[self.at : self.at + 2])
            self.at += len(digits) + 2 * bool(found[1])
            return ((int(digits, 16), int(digits, 16)),)
        if letter in _CONTROLS:
            return ((_CONTROLS[letter], _CONTROLS[letter]),)
        if not letter or letter.isalnum():
            raise UnreadableError("an escape of another dialect")
        return ((ord(letter), ord(letter)),)


def _class_of(letter: str, forbids: bool) -> Ranges:
    is_negative = letter.isupper()
    is_large = forbids != is_negative
    ranges = {
        "d": _all_digits() if is_large else _DIGITS,
        "w": (*WORD, (0x80, ALL[-1][1])) if is_large else WORD,
        "s": _ALL_SPACES if is_large else _SPACES,
    }[letter.lower()]
    return complement(ranges) if is_negative else ranges
