"""Forks: copies of a running engine, made many times faster than ``copy.deepcopy`` would.

What a copy consists of is found out once, when the engine is frozen; each thaw then runs down that list, without a
question asked. Copies by structure, knowing no class but those that hold what changes inside frozen shells; frozen
structs are shared.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, Generic, TypeVar

import msgspec

from engine.scheduler import Launched

__all__ = ["Frozen"]

_T = TypeVar("_T")
_Shell = Callable[[Any], Any]
_Build = Callable[[Any, list[Any]], Any]

_ATOMS: Final[set[type]] = {
    int, float, bool, str, bytes, type(None), type, frozenset, types.FunctionType, types.BuiltinFunctionType
}  # fmt: skip
_MAKE: Final[Callable[[type], Any]] = object.__new__


class Frozen(Generic[_T]):
    """A copy of ``engine`` as it is now, which never runs itself and can be thawed any number of times."""

    def __init__(self, engine: _T) -> None:
        plan = _CopyList()
        plan.add(engine)
        self._plan = plan
        # The first thaw is what all others are copied from: the engine itself goes on and changes.
        plan.sources = [
            new if made else kept for new, made, kept in zip(plan.thaw(), plan.made, plan.sources, strict=True)
        ]

    def thaw(self) -> _T:
        """An engine that shares nothing that can change. What is inside refers to itself as in the original."""
        return self._plan.thaw()[0]  # type: ignore[no-any-return]


class _CopyList:
    """Every object that a copy needs, by its place in one list, and what has to be put into which.

    ``shells`` make each object from its entry of ``sources``, with whatever cannot change in it already inside;
    ``made`` says whether that entry is such an object itself, or what it takes to make one.
    """

    def __init__(self) -> None:
        self.shells: list[_Shell] = []
        self.sources: list[Any] = []
        self.made: list[bool] = []
        self._places: dict[int, int] = {}
        self._items: list[tuple[int, Any, int]] = []  # a container, an index or a key of it, what belongs there
        self._attributes: list[tuple[int, str, int]] = []  # an object, an attribute of it, what belongs there
        self._members: list[tuple[int, list[Any]]] = []  # a set, its members
        self._pairs: list[tuple[int, list[Any], list[Any]]] = []  # a dict, its keys and values
        self._builds: list[tuple[int, _Build, Any, list[Any]]] = []  # what holds others and cannot be filled later

    def thaw(self) -> list[Any]:
        """A copy of everything; the first is the engine."""
        new = [shell(source) for shell, source in zip(self.shells, self.sources, strict=True)]
        for place, build, what, items in self._builds:
            new[place] = build(what, [new[item.place] if type(item) is _At else item for item in items])
        for place, key, item in self._items:
            new[place][key] = new[item]
        for place, name, item in self._attributes:
            setattr(new[place], name, new[item])
        for place, members in self._members:
            new[place].update([new[item.place] if type(item) is _At else item for item in members])
        for place, keys, values in self._pairs:
            into = new[place]
            for key, value in zip(keys, values, strict=True):
                into[new[key.place] if type(key) is _At else key] = new[value.place] if type(value) is _At else value
        return new

    def add(self, value: Any) -> int | None:
        """The place of an object's copy; None for what never changes and is shared."""
        kind = type(value)
        if kind in _ATOMS:
            return None
        place = self._places.get(id(value))
        if place is not None:
            return place
        planner = _PLANNERS.get(kind)
        if planner is None:
            planner = _planner_of(kind)
            if planner is None:
                _ATOMS.add(kind)
                return None
            _PLANNERS[kind] = planner
        return planner(self, value)

    def _append(self, value: Any, shell: _Shell, source: Any, *, made: bool = True) -> int:
        place = self._places[id(value)] = len(self.shells)
        self.shells.append(shell)
        self.sources.append(source)
        self.made.append(made)
        return place

    def _at(self, value: Any) -> Any:
        place = self.add(value)
        return value if place is None else _At(place)

    def add_list(self, value: list[Any]) -> int:
        # Lists are uniform: when the last item cannot change, none can.
        if not value or type(value[-1]) in _ATOMS:
            return self._append(value, list.copy, value)
        if type(value[-1]) is list:
            # The pages of KV: lists of numbers that nobody else refers to, and half of all that there is to copy.
            return self._append(value, _copy_lists, value)
        return self._indexed(value, list.copy, enumerate(value))

    def add_deque(self, value: deque[Any]) -> int:
        return self._indexed(value, deque.copy, enumerate(value))

    def add_dict(self, value: dict[Any, Any]) -> int:
        if all(type(key) in _ATOMS or self.add(key) is None for key in value):
            return self._indexed(value, dict.copy, value.items())
        place = self._append(value, _empty, dict, made=False)
        self._pairs.append((place, [self._at(key) for key in value], [self._at(item) for item in value.values()]))
        return place

    def _indexed(self, value: Any, shell: _Shell, items: Any) -> int:
        place = self._append(value, shell, value)
        for key, item in items:
            if type(item) not in _ATOMS:
                into = self.add(item)
                if into is not None:
                    self._items.append((place, key, into))
        return place

    def add_set(self, value: set[Any]) -> int:
        members = [self._at(item) for item in value]
        if not any(type(item) is _At for item in members):
            return self._append(value, set.copy, value)
        place = self._append(value, _empty, set, made=False)
        self._members.append((place, members))
        return place

    def add_bytearray(self, value: bytearray) -> int:
        return self._append(value, bytearray.copy, value)

    def add_tuple(self, value: tuple[Any, ...]) -> int | None:
        # What changes is first or last in the tuples here: (last_used, id, node) in the heap, (node, pages) in the
        # audit. Long ones are token ids, and to look at each of those would take longer than all the rest.
        if not value or (type(value[-1]) in _ATOMS and type(value[0]) in _ATOMS):
            return None
        items = [self._at(item) for item in value]
        return self._built(value, _build_tuple, None, items) if any(type(item) is _At for item in items) else None

    def add_method(self, value: types.MethodType) -> int:
        return self._built(value, _build_method, value.__func__, [self._at(value.__self__)])

    def add_launched(self, value: Launched) -> int:
        # Frozen itself, but its requests are the live ones.
        return self._built(value, _build_launched, value, [self._at(request) for request in value.requests])

    def _built(self, value: Any, build: _Build, what: Any, items: list[Any]) -> int:
        place = self._append(value, _nothing, None, made=False)
        self._builds.append((place, build, what, items))
        return place

    def add_instance(self, value: Any, names: tuple[str, ...]) -> int:
        place = self._append(value, _instance(type(value), names), value)  # type: ignore[arg-type]
        for name in names:
            into = self.add(getattr(value, name))
            if into is not None:
                self._attributes.append((place, name, into))
        return place


class _At:
    """What stands for an object in a list of things that are not all copied: its place."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


def _copy_lists(value: list[list[Any]]) -> list[list[Any]]:
    return [item.copy() for item in value]


def _nothing(value: None) -> None:
    return value


def _empty(kind: type) -> Any:
    return kind()


def _build_tuple(what: None, items: list[Any]) -> tuple[Any, ...]:
    del what
    return tuple(items)


def _build_method(what: Callable[..., Any], items: list[Any]) -> types.MethodType:
    return types.MethodType(what, items[0])


def _build_launched(what: Launched, items: list[Any]) -> Launched:
    return Launched(what.microbatch, tuple(items), what.step)


_PLANNERS: Final[dict[type, Callable[[_CopyList, Any], int | None]]] = {
    list: _CopyList.add_list,
    tuple: _CopyList.add_tuple,
    dict: _CopyList.add_dict,
    set: _CopyList.add_set,
    deque: _CopyList.add_deque,
    bytearray: _CopyList.add_bytearray,
    types.MethodType: _CopyList.add_method,
    Launched: _CopyList.add_launched,
}


def _planner_of(kind: type) -> Callable[[_CopyList, Any], int | None] | None:
    """How to copy objects of a class; None when they never change."""
    if issubclass(kind, msgspec.Struct | Enum | type):
        return None
    slots = tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return lambda plan, value: plan.add_instance(value, slots or tuple(value.__dict__))


@functools.cache
def _instance(kind: type, names: tuple[str, ...]) -> _Shell:
    # One attribute after the other: an object that is handed a ready __dict__ is slower for the rest of its life. And
    # written out for each class, as dataclasses do: a loop over the names takes four times as long.
    lines = ["def copy(value):", "    new = make(kind)", *[f"    new.{name} = value.{name}" for name in names]]
    scope: dict[str, Any] = {"make": _MAKE, "kind": kind}
    exec("\n".join([*lines, "    return new"]), scope)  # noqa: S102 - names of attributes, which are identifiers
    return scope["copy"]  # type: ignore[no-any-return]
