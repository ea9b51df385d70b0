"""Finds the rules of a Lark grammar that derive a finite text, by a least fixpoint over the rules.

Reads only the part of the language that this needs, and assumes that all else has a finite text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, Final

from engine.grammar.schema_ends import endless_place

_TOKEN: Final = re.compile(
    r"""(?P<space>\s+|//[^\n]*|\#[^\n]*)
    |(?P<text>"(?:[^"\\\n]|\\.)*"i?|/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*|<[^>\n]*>|@[\w.-]+)
    |(?P<json>%json)
    |(?P<count>\{\s*\d*\s*(?:,\s*\d*\s*)?\}|~\s*\d+(?:\s*\.\.\s*\d+)?)
    |(?P<name>[A-Za-z_][\w-]*)
    |(?P<sign>[|()\[\]*+?])
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_DEFINITION: Final = re.compile(r"^[?!]?([A-Za-z_][\w-]*)(?:\[[^\]\n]*\])?(?:\.-?\d+)?\s*:", re.MULTILINE)
_DIRECTIVE: Final = re.compile(r"^%(?!json)[^\n]*$", re.MULTILINE)
_LEAST: Final = re.compile(r"\d+")
START: Final = "start"

# Alternatives, each with the names of the rules that it needs.
_Needs = frozenset[str]
_Alternatives = frozenset[_Needs]
_NOTHING: Final[_Alternatives] = frozenset((frozenset(),))
# The name of a rule without a finite text.
_NEVER: Final = "%never"
# A grammar with more alternatives is not examined.
MOST_ALTERNATIVES: Final = 4096


class _UnknownError(Exception):
    """Raised for a grammar that this reader does not understand, or with too many alternatives."""


def endless_rule(lark: str) -> str | None:
    """Return a rule without a finite text that is reachable from the start; None without one, or in doubt."""
    try:
        rules = {name: _Reader(body).alternatives() for name, body in _definitions(lark)}
    except (_UnknownError, RecursionError, ValueError):
        return None
    ends: set[str] = set()
    while True:
        more = {
            name
            for name, alternatives in rules.items()
            if name not in ends
            and any(all(need in ends or _is_foreign(need, rules) for need in one) for one in alternatives)
        }
        if not more:
            break
        ends |= more
    reached, open_names = {START}, [START]
    while open_names:
        name = open_names.pop()
        if name in rules and name not in ends:
            return name
        for need in {need for one in rules.get(name, ()) for need in one} - reached:
            reached.add(need)
            open_names.append(need)
    return None


def _is_foreign(name: str, rules: dict[str, _Alternatives]) -> bool:
    return name not in rules and name != _NEVER


def _definitions(lark: str) -> Iterator[tuple[str, str]]:
    text = _DIRECTIVE.sub("", lark)
    found = list(_DEFINITION.finditer(text))
    for one, following in zip(found, [*found[1:], None], strict=True):
        yield one[1], text[one.end() : following.start() if following is not None else len(text)]


class _Reader:
    """Reads the body of one rule."""

    def __init__(self, body: str) -> None:
        self._tokens = list(_tokens(body))
        self._at = 0

    def alternatives(self) -> _Alternatives:
        found = self._choice()
        if self._at < len(self._tokens):
            raise _UnknownError
        return found

    def _choice(self) -> _Alternatives:
        found = self._sequence()
        while self._peek() == ("sign", "|"):
            self._at += 1
            found |= self._sequence()
        return found

    def _sequence(self) -> _Alternatives:
        found = _NOTHING
        while (token := self._peek()) is not None and token not in (("sign", "|"), ("sign", ")"), ("sign", "]")):
            item = self._item()
            found = frozenset(one | other for one in found for other in item)
            if len(found) > MOST_ALTERNATIVES:
                raise _UnknownError
        return found

    def _item(self) -> _Alternatives:
        kind, text = self._tokens[self._at]
        self._at += 1
        if kind == "name":
            found: _Alternatives = frozenset((frozenset((text,)),))
        elif kind in ("text", "json"):
            found = frozenset((frozenset((_NEVER,)),)) if text == _NEVER else _NOTHING
        elif text in ("(", "["):
            found = self._choice()
            if self._peek() != ("sign", ")" if text == "(" else "]"):
                raise _UnknownError
            self._at += 1
            found = found if text == "(" else found | _NOTHING
        else:
            raise _UnknownError
        return self._repeated(found)

    def _repeated(self, item: _Alternatives) -> _Alternatives:
        while (token := self._peek()) is not None and (token[0] == "count" or token[1] in ("*", "+", "?")):
            self._at += 1
            least = _LEAST.search(token[1])
            if token[1] in ("*", "?") or (token[0] == "count" and (least is None or int(least[0]) == 0)):
                item |= _NOTHING
        return item

    def _peek(self) -> tuple[str, str] | None:
        return self._tokens[self._at] if self._at < len(self._tokens) else None


def _tokens(body: str) -> Iterator[tuple[str, str]]:
    at = 0
    while at < len(body):
        found = _TOKEN.match(body, at)
        assert found is not None, "the last alternative takes any character"
        at = found.end()
        kind = found.lastgroup
        if kind == "json":
            start = len(body) - len(body[at:].lstrip())
            schema, at = _decoder.raw_decode(body, start)
            yield "json", _NEVER if _is_endless(schema) else ""
        elif kind == "other":
            raise _UnknownError
        elif kind is not None and kind != "space":
            yield kind, found.group() if kind in ("name", "sign", "count") else ""


_decoder = json.JSONDecoder()


def _is_endless(schema: Any) -> bool:
    return schema is False or endless_place(schema) is not None
