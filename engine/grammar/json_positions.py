"""Follows a JSON text byte by byte along its schema, to know the items of the lists whose items must be distinct.

A position is immutable, so that guesses can be taken back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Hashable
from decimal import Decimal, InvalidOperation
from enum import Enum, auto
from typing import Any, Final, NamedTuple

from engine.grammar.list_alternatives import DISTINCT, Alternatives, Schemas, has_length, identity
from engine.grammar.schema_ends import listed, named

# In a rewritten schema: the names of this object are distinct, because their number counts.
DISTINCT_NAMES: Final = "x-distinct-names"
_SPACE: Final = frozenset(b" \t\n\r")
_QUOTE, _ESCAPE, _COMMA, _COLON = b'"\\,:'
_OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT, _CLOSE_OBJECT = b"[]{}"
_AFTER_SCALARS: Final = frozenset(b",]}") | _SPACE
_MOST_NESTED_PARTS: Final = 256

_ODD_EXPONENT: Final = re.compile(rb"[eE][+-]?\d{3}|^-?[0.]+[eE]")
_IN_STRING: Final = re.compile(rb'["\\]')

Target = Callable[[Any], Any]


class Mode(Enum):
    VALUE = auto()
    SCALAR = auto()
    STRING = auto()
    ESCAPE = auto()
    AFTER = auto()
    KEY = auto()
    KEY_STRING = auto()
    KEY_ESCAPE = auto()
    COLON = auto()


class Frame(NamedTuple):
    """An open list or object.

    ``schemas`` are all that may describe it, ``texts`` and ``values`` its complete items or names, if they must be
    distinct. ``opened`` is after its bracket, ``start`` where its open item or name begins, ``key`` its last name.
    ``repeating`` are the alternatives in which items may repeat, and that all items so far are certain to fit;
    ``is_chosen`` tells that alternatives of the schema describe it.
    """

    schemas: Schemas
    is_list: bool
    is_distinct: bool = False
    opened: int = 0
    texts: tuple[bytes, ...] = ()
    values: frozenset[Hashable] = frozenset()
    start: int | None = None
    size: int = 0
    key: str = ""
    repeating: tuple[Schemas, ...] = ()
    has_repeated: bool = False
    is_chosen: bool = False


class RepeatedError(Exception):
    """Raised where an item is complete that equals another one of its list."""


class NotJsonError(Exception):
    """Raised for bytes that continue no JSON text."""


class Position(NamedTuple):
    at: int = 0
    mode: Mode = Mode.VALUE
    frames: tuple[Frame, ...] = ()
    # Where the open scalar or name begins.
    start: int = 0


class Walk:
    """Moves positions along the schemas of one grammar."""

    def __init__(self, root: Any, target: Target) -> None:
        self._target = target
        self._schema = root
        self._alternatives = Alternatives(target)

    def _described(self, schemas: tuple[Any, ...]) -> Schemas:
        """Return all schemas that may describe a value that one of these describes."""
        found: dict[int, dict[str, Any]] = {}
        todo = list(schemas)
        while todo and len(found) < _MOST_NESTED_PARTS:
            one = todo.pop()
            if not isinstance(one, dict) or id(one) in found:
                continue
            found[id(one)] = one
            todo.append(self._target(one))
            for name in ("allOf", "anyOf", "oneOf"):
                todo += listed(one, name)
        return tuple(found.values())

    @staticmethod
    def _items_of(frame: Frame) -> tuple[Any, ...]:
        """Return the schemas of the next item of a list."""
        found = []
        for one in frame.schemas:
            items = one.get("items")
            first = items if isinstance(items, list) else listed(one, "prefixItems")
            rest = one.get("additionalItems") if isinstance(items, list) else items
            found.append(first[frame.size] if frame.size < len(first) else rest)
        return tuple(found)

    @staticmethod
    def _members_of(frame: Frame) -> tuple[Any, ...]:
        found: list[Any] = []
        for one in frame.schemas:
            properties = named(one, "properties")
            found += [properties[frame.key]] if frame.key in properties else [one.get("additionalProperties")]
            found += named(one, "patternProperties").values()
        return tuple(found)

    def moved(self, position: Position, text: bytes | bytearray, more: bytes) -> Position:
        """Return the position after ``more``, which follows the text up to the position.

        Raises RepeatedError and NotJsonError.
        """
        source = _Source(text, more, position.at)
        while (place := position.at - source.base) < len(more):
            if position.mode in (Mode.STRING, Mode.KEY_STRING):
                found = _IN_STRING.search(more, place)
                if found is None:
                    return position._replace(at=source.base + len(more))
                if found.start() > place:
                    position = position._replace(at=source.base + found.start())
                    place = found.start()
            position = self._step(position, more[place], source)
        return position

    def _step(self, position: Position, byte: int, source: _Source) -> Position:
        mode, at = position.mode, position.at
        if mode is Mode.SCALAR and byte in _AFTER_SCALARS:
            return self._complete(position, source)
        after = position._replace(at=at + 1)
        match mode:
            case Mode.SCALAR:
                _require_plain_exponent(after, source)
                return after
            case Mode.ESCAPE:
                return after._replace(mode=Mode.STRING)
            case Mode.KEY_ESCAPE:
                return after._replace(mode=Mode.KEY_STRING)
            case Mode.STRING:
                return after._replace(mode=Mode.ESCAPE) if byte == _ESCAPE else self._complete(after, source)
            case Mode.KEY_STRING if byte == _ESCAPE:
                return after._replace(mode=Mode.KEY_ESCAPE)
            case Mode.KEY_STRING:
                return _named(after, source)
        if byte in _SPACE:
            return after
        return self._begun(after, byte, source) if mode is Mode.VALUE else self._between(after, byte, source)

    def _between(self, after: Position, byte: int, source: _Source) -> Position:
        """Step over a sign between names and values."""
        mode, frames = after.mode, after.frames
        if mode is Mode.COLON and byte == _COLON:
            return after._replace(mode=Mode.VALUE)
        if mode is Mode.KEY and byte == _QUOTE:
            return after._replace(
                mode=Mode.KEY_STRING, start=after.at - 1, frames=_with_last(frames, start=after.at - 1)
            )
        if frames and mode is Mode.AFTER and byte == _COMMA:
            return after._replace(mode=Mode.VALUE if frames[-1].is_list else Mode.KEY)
        if frames and mode in (Mode.AFTER, Mode.KEY) and byte == (_CLOSE_LIST if frames[-1].is_list else _CLOSE_OBJECT):
            _require_length(frames[-1])
            return self._complete(after._replace(frames=frames[:-1]), source)
        raise NotJsonError

    def _begun(self, after: Position, byte: int, source: _Source) -> Position:
        """Begin a value, or close an empty list."""
        frames = after.frames
        if byte == _CLOSE_LIST and frames and frames[-1].is_list and not frames[-1].size:
            return self._complete(after._replace(frames=frames[:-1]), source)
        if frames and frames[-1].is_list:
            frames = _with_last(frames, start=after.at - 1)
        if byte not in (_OPEN_LIST, _OPEN_OBJECT):
            mode = Mode.STRING if byte == _QUOTE else Mode.SCALAR
            return after._replace(mode=mode, frames=frames, start=after.at - 1)
        inner: tuple[Any, ...] = (self._schema,)
        if frames:
            inner = self._items_of(frames[-1]) if frames[-1].is_list else self._members_of(frames[-1])
        schemas = self._described(inner)
        is_list = byte == _OPEN_LIST
        word = DISTINCT if is_list else DISTINCT_NAMES
        is_distinct = any(one.get(word) is True for one in schemas)
        is_outer_chosen = bool(frames) and frames[-1].is_chosen
        is_chosen = is_outer_chosen or any(listed(one, name) for one in schemas for name in ("anyOf", "oneOf"))
        # Which alternative describes the value around decides, too, what this one may be.
        repeats = is_distinct and is_list and is_chosen and not is_outer_chosen
        repeating = tuple(self._alternatives.repeating(inner)) if repeats else ()
        frame = Frame(schemas, is_list, is_distinct, after.at, repeating=repeating, is_chosen=is_chosen)
        frames = (*frames, frame)
        return after._replace(mode=Mode.VALUE if is_list else Mode.KEY, frames=frames)

    def _complete(self, after: Position, source: _Source) -> Position:
        """Complete a value that ends at the position."""
        frames = after.frames
        if not frames or not frames[-1].is_list:
            return after._replace(mode=Mode.AFTER)
        frame = frames[-1]
        changed = frame._replace(start=None, size=frame.size + 1)
        if frame.is_distinct and frame.start is not None:
            text = source.read(frame.start, after.at)
            value = json.loads(text, parse_int=_number, parse_float=_number)
            repeating = self._alternatives.fitting(frame.repeating, frame.size, value)
            changed = _with(changed._replace(repeating=repeating), identity(value), text)
        return after._replace(mode=Mode.AFTER, frames=(*frames[:-1], changed))


class _Source(NamedTuple):
    """A text and what follows its first ``base`` bytes."""

    text: bytes | bytearray
    more: bytes
    base: int

    def read(self, start: int, end: int) -> bytes:
        return (
            bytes(self.text[start : min(end, self.base)])
            + self.more[max(start - self.base, 0) : max(end - self.base, 0)]
        )


def _named(after: Position, source: _Source) -> Position:
    """Complete the name of a property."""
    text = source.read(after.start, after.at)
    name = json.loads(text)
    frame = after.frames[-1]._replace(key=name, start=None)
    if frame.is_distinct:
        frame = _with(frame, name, text)
    return after._replace(mode=Mode.COLON, frames=(*after.frames[:-1], frame))


def _with(frame: Frame, value: Hashable, text: bytes) -> Frame:
    """Add an item or a name that must be another one, unless it may repeat. Raises RepeatedError."""
    has_repeated = frame.has_repeated or value in frame.values
    if has_repeated and not frame.repeating:
        raise RepeatedError
    if has_repeated:
        frame = frame._replace(has_repeated=True)
    return frame._replace(texts=(*frame.texts, text), values=frame.values | {value})


def _require_length(frame: Frame) -> None:
    """Raise RepeatedError for a list that no alternative in which its items may repeat lets end here."""
    if frame.has_repeated and not any(has_length(schemas, frame.size) for schemas in frame.repeating):
        raise RepeatedError


def _with_last(frames: tuple[Frame, ...], **changes: Any) -> tuple[Frame, ...]:
    return (*frames[:-1], frames[-1]._replace(**changes))


def _require_plain_exponent(after: Position, source: _Source) -> None:
    """Raise RepeatedError for a number that is zero or infinity for readers, as others are, however it goes on."""
    frame = after.frames[-1] if after.frames else None
    if (
        frame is not None
        and frame.is_list
        and frame.is_distinct
        and _ODD_EXPONENT.search(source.read(after.start, after.at))
    ):
        raise RepeatedError


def _number(text: str) -> Decimal | str:
    """Return the value of a number; its text if the exponent is beyond all decimals."""
    try:
        return Decimal(text)
    except InvalidOperation:
        return text.lower()
