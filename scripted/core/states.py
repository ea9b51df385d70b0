"""Digests the whole state of a run: two runs with equal digests continue alike, however they got there.

Traverses every reachable object by structure, without knowing its class. Equal states may have different digests,
which costs one redundant run; different states have different digests, because equal ones would hide a failure.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import random
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from operator import attrgetter
from typing import Any, Final

import msgspec

_ATOMS: Final = frozenset({int, str, bool, float, bytes, type(None)})
_DIGEST_BYTES: Final = 16
_KNOWN_LIMIT: Final = 20_000
# Newer formats encode object identity, which may differ between equal states.
_FORMAT: Final = 2
# Marks a reference to an object, so that it is never mistaken for a value.
_OBJECT: Final = "\0object"
# Reads the objects of one class.
_Reader = Callable[["_Reading", Any], object]


class UnreadableState(Exception):
    """An object of a run exposes neither attributes nor items that could be read."""


class StateReader:
    """Digests object graphs. ``left_out``: attributes by class that no later step depends on, such as counters."""

    def __init__(self, left_out: Mapping[type, Collection[str]] | None = None) -> None:
        self._left_out = dict(left_out or {})
        self._shapes: dict[tuple[object, ...], tuple[tuple[str, ...], Callable[[object], tuple[object, ...]]]] = {}
        # The contents of frozen messages and plans, by address; keeping the object alive keeps its address from reuse.
        self.known: dict[int, tuple[object, object]] = {}
        self._readers: dict[type, _Reader] = {
            list: _Reading.builtin,
            tuple: _Reading.builtin,
            deque: _Reading.each,
            dict: _Reading.builtin,
            set: _Reading.unordered,
            frozenset: _Reading.unordered,
            bytearray: lambda _, value: bytes(value),
            types.MethodType: _Reading.method,
            functools.partial: _Reading.partial,
            random.Random: lambda _, value: repr(value.getstate()),
        }

    def digest(self, *roots: object) -> bytes:
        """Digest everything that is reachable from the roots. Raises UnreadableState."""
        if len(self.known) > _KNOWN_LIMIT:
            self.known.clear()
        reading = _Reading(self)
        found: list[object] = [reading.value(root) for root in roots]
        # The list of instances grows while their attributes are read.
        found += map(reading.attributes, reading.instances)
        return hashlib.blake2b(marshal.dumps(found, _FORMAT), digest_size=_DIGEST_BYTES).digest()

    def reader_of(self, kind: type) -> _Reader:
        reader = self._readers.get(kind)
        if reader is None:
            reader = self._readers[kind] = _reader_of(kind)
        return reader

    def attributes_of(self, value: object) -> tuple[tuple[str, ...], Callable[[object], tuple[object, ...]]]:
        """Return the names of the attributes that belong to the state, sorted, and a getter for them."""
        kind: Any = type(value)
        shape = kind, *getattr(value, "__dict__", ())
        known = self._shapes.get(shape)
        if known is None:
            out = {name for base in kind.__mro__ for name in self._left_out.get(base, ())}
            fields: tuple[str, ...] = kind.__struct_fields__ if issubclass(kind, msgspec.Struct) else slots_of(kind)
            # An object may have empty slots: its shape is read, but not cached for the class.
            names = tuple(sorted({name for name in (*fields, *shape[1:]) if hasattr(value, name)} - out))
            known = names, attrgetter(*names, "__class__", "__class__")
            if len(names) == len({*fields, *shape[1:]} - out):
                self._shapes[shape] = known
        return known


class _Reading:
    """One traversal: it numbers objects when it first meets them, and reads them in that order."""

    def __init__(self, states: StateReader) -> None:
        self._readers = states._readers  # noqa: SLF001 - same file; looked up for every object
        self._states = states
        self._numbers: dict[int, int] = {}
        self._met = 0
        self.instances: list[object] = []

    def value(self, value: object) -> object:
        kind = type(value)
        if kind in _ATOMS:
            return value
        return (self._readers.get(kind) or self._states.reader_of(kind))(self, value)

    def builtin(self, value: Any) -> object:
        """Read a list, a tuple or a dict: in one go if it holds only numbers and text."""
        try:
            return marshal.dumps(value, _FORMAT)
        except ValueError:
            if type(value) is dict:
                return self.each(value), self.each(value.values())
            return self.each(value)

    def each(self, values: Iterable[object]) -> object:
        return tuple([item if type(item) in _ATOMS else self.value(item) for item in values])

    def unordered(self, value: Collection[object]) -> object:
        return sorted([self.value(item) for item in value], key=repr)

    def method(self, value: types.MethodType) -> object:
        return value.__func__.__qualname__, self.value(value.__self__)

    def partial(self, value: functools.partial[object]) -> object:
        return self.value(value.func), self.each(value.args), self.builtin(value.keywords)

    def struct(self, value: msgspec.Struct) -> object:
        known = self._states.known.get(id(value))
        if known is not None:
            return known[1]
        met = self._met
        read = type(value).__name__, self.each(self._states.attributes_of(value)[1](value)[:-2])
        if self._met == met and type(value).__struct_config__.frozen:
            self._states.known[id(value)] = value, read
        return read

    def instance(self, value: object) -> object:
        self._met += 1
        number = self._numbers.get(id(value))
        if number is None:
            number = self._numbers[id(value)] = len(self.instances)
            self.instances.append(value)
        return _OBJECT, number

    def attributes(self, value: object) -> object:
        names, read = self._states.attributes_of(value)
        inside: object = ()
        if isinstance(value, dict):
            inside = self.each(value), self.each(value.values())
        elif isinstance(value, list | tuple | deque | set):
            inside = self.unordered(value) if isinstance(value, set) else self.each(value)
        return type(value).__qualname__, names, self.each(read(value)[:-2]), inside


def _reader_of(kind: Any) -> _Reader:
    if issubclass(kind, Enum):
        return lambda _, value: f"{kind.__name__}.{value.name}"
    if issubclass(kind, msgspec.Struct):
        return _Reading.struct
    if issubclass(kind, type | types.ModuleType):
        return lambda _, value: value.__name__
    if issubclass(kind, types.FunctionType | types.BuiltinFunctionType):
        return _function
    if issubclass(kind, int | str | float | bytes):
        return lambda _, value: repr(value)
    if kind.__dictoffset__ or slots_of(kind) or issubclass(kind, list | dict | tuple | set | deque):
        return _Reading.instance
    if kind is object:
        return _Reading.instance
    return _unreadable


def _function(reading: _Reading, value: types.FunctionType | types.BuiltinFunctionType) -> object:
    """Read a function by name, with its closure or the object that it is bound to, which are state."""
    cells = getattr(value, "__closure__", None) or ()
    owner = getattr(value, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType | type):
        return value.__qualname__, reading.value(owner)
    return value.__qualname__, reading.each([cell.cell_contents for cell in cells])


def _unreadable(_: _Reading, value: object) -> object:
    kind = type(value)
    raise UnreadableState(f"a {kind.__module__}.{kind.__qualname__} has neither attributes nor items to read")


@functools.cache
def slots_of(kind: type) -> tuple[str, ...]:
    names: list[str] = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        names += (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in names if name not in ("__dict__", "__weakref__"))
