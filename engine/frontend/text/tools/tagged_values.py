"""Reads arguments between tags into one JSON object, even if models forget or damage closing tags.

Decides where a value without quotes ends: at its closing tag, intact or damaged, if a part of the call follows, and
otherwise where the next argument or the end of the call is certain. Knows no family's format.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from engine.frontend.text.incoming_text import Emit, IncomingText, Reading
from engine.frontend.text.tools.argument_schemas import Properties, choices_of, is_text
from engine.frontend.text.tools.call_parts import CallParts
from engine.frontend.text.tools.closing_tags import is_closer
from engine.frontend.text.tools.json_values import PYTHON_WORDS, SPACE, escaped, json_of_number, mended, refuse_constant
from engine.frontend.text.tools.nested_calls import BEFORE_TAG, NestedCalls

_TYPES = {bool: ("boolean",), int: ("integer", "number"), float: ("number",), str: ("string",), list: ("array",)}
_ANY: Final = frozenset[str]()
# Alternatives within alternatives; a client decides the depth.
_MOST_NESTED: Final = 8
# Anything shorter, such as a sign of comparison, is a part of the value.
_SHORTEST_TAG: Final = len("</k>")


class WrittenArguments:
    """The arguments of one call, written one by one into a JSON object."""

    def __init__(self, parts: CallParts) -> None:
        self._parts = parts
        self.keys: set[str] = set()

    def key(self, key: str) -> None:
        """Begin an argument; ``add`` takes its value."""
        self._parts.argue(f'{", " if self.keys else "{"}"{escaped(key)}": ')
        self.keys.add(key)

    def add(self, text: str) -> None:
        self._parts.argue(text)

    def end(self) -> None:
        self._parts.argue("}" if self.keys else "{}")
        self._parts.end()


def may_follow(key: str, arguments: WrittenArguments, properties: Properties, at_line_start: bool) -> bool:
    """Return whether an opening tag inside a value begins the next argument: one of the tool's that was not given yet.

    If the tool's arguments are unknown, the tag must be at the start of a line.
    """
    if not key or key in arguments.keys:
        return False
    return key in properties if properties else at_line_start


def json_of(written: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of a complete value: a string if the text is not JSON or fits the schema only as a string."""
    stripped = written.strip()
    stripped = PYTHON_WORDS.get(stripped, stripped)
    try:
        value = json.loads(stripped, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return _mended(stripped, schema) or f'"{escaped(written)}"'
    return stripped if _fits(value, written, schema) else f'"{escaped(written)}"'


def is_argument(written: str | None, schema: Mapping[str, Any] | None) -> bool:
    """Return whether a text is a value of a schema; None for the text asks only whether there is the schema."""
    if schema is None or written is None:
        return schema is not None
    choices = choices_of(schema)
    if choices and all(isinstance(choice, str) for choice in choices):
        return written.strip() in choices or json.loads(json_of(written, schema)) in choices
    types = _types_of(schema)
    return not types or "string" in types or not json_of(written, schema).startswith('"')


def _mended(written: str, schema: Mapping[str, Any]) -> str:
    """Return the JSON of an object, a list or a number that is almost JSON; empty if it could be meant as a text."""
    wanted = {"{": "object", "[": "array"}.get(written[:1])
    types = _types_of(schema)
    if not types.isdisjoint(("integer", "number")) and "string" not in types and (number := json_of_number(written)):
        return number
    if wanted not in types or "string" in types:
        return ""
    value = mended(written)
    try:
        json.loads(value, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return ""
    return value


def _fits(value: Any, written: str, schema: Mapping[str, Any]) -> bool:
    """Return whether a value fits its schema; also true for a wrong type if a string would be wrong too."""
    choices = choices_of(schema)
    if written in choices:
        return any(type(one) is type(value) and one == value for one in choices)
    types = _types_of(schema)
    return "string" not in types or any(name in types for name in _names_of(value))


def _names_of(value: Any) -> tuple[str, ...]:
    """Return the names of the type of a value in schemas."""
    return ("null",) if value is None else _TYPES.get(type(value), ("object",))


def _types_of(schema: Any, depth: int = 0) -> frozenset[str]:
    """Return the types that a schema or one of its alternatives names; none if any is allowed."""
    if not isinstance(schema, dict) or depth > _MOST_NESTED:
        return _ANY
    types = schema.get("type")
    if isinstance(types, str | list):
        return frozenset([types] if isinstance(types, str) else [one for one in types if isinstance(one, str)])
    if choices := choices_of(schema):
        return frozenset(name for one in choices for name in _names_of(one))
    for keyword in ("anyOf", "oneOf"):
        alternatives = schema.get(keyword)
        if isinstance(alternatives, list) and alternatives:
            named = [_types_of(one, depth + 1) for one in alternatives]
            return frozenset[str]().union(*named) if all(named) else _ANY
    return _ANY


class TaggedValues:
    """Reads the values of one call.

    ``close`` closes a value if one of ``followers``, a closing tag of ``closers``, or the end comes next. ``forgotten``
    reads on from a tag and returns whether it ends a value without a closing tag, unless calls are ``nested`` in the
    value. A tag that ``opens`` a value may follow one whose own tags are not the usual ones, and
    a position where the call ``resumes`` without one any value. With ``lines`` a value is
    on its own lines: one line feed before it and one after it are not part of it.
    """

    def __init__(
        self,
        text: IncomingText,
        *,
        close: str,
        followers: Sequence[str],
        closers: Sequence[str],
        forgotten: Callable[[str, bool], Reading[bool]],
        nested: NestedCalls,
        opens: Callable[[str], bool] = lambda _: False,
        resumes: Callable[[], Reading[bool]] | None = None,
        lines: bool,
    ) -> None:
        self._text = text
        self._close = close
        self._followers = tuple(followers)
        self._closers = closers
        self._forgotten = forgotten
        self._nested = nested
        self._opens = opens
        self._resumes = resumes
        self._lines = lines

    def read(
        self, schema: Mapping[str, Any], arguments: WrittenArguments, key: str, element: str = ""
    ) -> Reading[bool]:
        """Read the value of ``key``, and add both to the arguments. False if it was cut.

        ``element`` is the name of the tag that opened the value, if it is another one than usual.
        """
        arguments.key(key)
        # Models sometimes close a value with its name.
        names = (key, element) if element else (key,)
        if is_text(schema):
            arguments.add('"')
            whole = yield from self._until_closed(lambda text: arguments.add(escaped(text)), names)
            if whole:
                arguments.add('"')
            return whole
        kept: list[str] = []
        whole = yield from self._until_closed(kept.append, names)
        if whole:
            arguments.add(json_of("".join(kept), schema))
        return whole

    def skip(self) -> Reading[bool]:
        """Read a value without a name, and drop it."""
        return (yield from self._until_closed(lambda _: None, ()))

    def _until_closed(self, emit: Emit, names: tuple[str, ...]) -> Reading[bool]:
        text, value = self._text, _Value(emit, lines=self._lines)
        start = text.place
        while True:
            yield from text.run(BEFORE_TAG, value.add)
            if not (yield from text.peek()):
                value.end(1 + self._lines if text.has_stopped else int(self._lines))
                return text.has_stopped
            tag = yield from text.tag()
            if len(tag) < _SHORTEST_TAG:
                value.add(text.take(len(tag)))
                continue
            if (yield from self._is_closed(names)):
                value.end(int(self._lines))
                return True
            if (end := (yield from self._nested.end_of(start, tag, value.at_line_start))) is not None:
                value.add(text.take(end - text.place))
                continue
            text.mark()
            ends = yield from self._forgotten(tag, value.at_line_start)
            text.rewind()
            if ends:
                # The line feeds around the missing tag belong to it.
                value.end(1 + self._lines)
                return True
            value.add(text.take(1))

    def _is_closed(self, names: tuple[str, ...]) -> Reading[bool]:
        """Read the closing tag at this position if it closes the value; any other tag is a part of the value."""
        text = self._text
        text.mark()
        tag = yield from text.tag()
        is_named = tag.startswith("</") and tag[2:-1] in names and tag.endswith(">")
        if is_named or is_closer(tag, self._close, (*self._followers, *self._closers)):
            text.take(len(tag))
            yield from text.run(SPACE)
            after = yield from text.tag()
            follows = after.startswith(self._followers) or any(
                is_closer(after, closer, self._followers) for closer in self._closers
            )
            is_unusual = is_named or len(names) > 1
            if not follows and self._resumes is not None:
                follows = yield from self._resumes()
            if follows or (is_unusual and self._opens(after)) or not (yield from text.peek()):
                text.unmark()
                return True
        text.rewind()
        return False


class _Value:
    """Passes a value on, but holds back line feeds until it is known whether they belong to it.

    They include carriage returns if the one before the value does.
    """

    def __init__(self, emit: Emit, *, lines: bool) -> None:
        self._emit = emit
        self._skips_line = lines
        self._line_end = "\n"
        self._held = ""
        self._shown = ""

    @property
    def at_line_start(self) -> bool:
        return bool(self._held) or not self._shown

    def add(self, text: str) -> None:
        text = self._held + text
        if self._skips_line and text:
            if text == "\r":
                self._held = text
                return
            self._skips_line = False
            self._line_end = "\r\n" if text.startswith("\r\n") else "\n"
            text = text.removeprefix(self._line_end)
        at = len(text.rstrip(self._line_end))
        self._held = text[at:]
        if at:
            self._shown = text[at - 1]
            self._emit(text[:at])

    def end(self, lines: int) -> None:
        """End the value; ``lines`` of its last line feeds belong to the following tag."""
        for _ in range(lines):
            self._held = self._held.removesuffix(self._line_end)
        if self._held:
            self._emit(self._held)
