"""Forks: copies of a running machine, made many times faster than with ``copy.deepcopy``.

Freezing a machine traverses its object graph once and plans a list of copies; each thaw replays that list. Copying goes
by structure and knows no classes but those given to a ``Copier``; frozen structs are shared.
"""

from __future__ import annotations

import copy
import functools
import logging
import random
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from operator import call
from typing import Any, Final, Generic, TypeVar

import msgspec

from scripted.core.refusals import HarnessError
from scripted.core.states import slots_of

_T = TypeVar("_T")
# Callables for the objects of one class: make an empty copy, build one from its parts, fill it, plan all of that.
_Shell = Callable[[Any], object]
_Build = Callable[[Any, list[Any]], Any]
_Fill = Callable[[Any, list[object], tuple[int, ...]], None]
_Container = dict[object, object] | list[object] | set[object] | deque[object]
_Planner = Callable[["_CopyList", Any], "int | None"]

_ATOMS: Final[frozenset[type]] = frozenset({
    int, float, bool, str, bytes, type(None), type, frozenset
})  # fmt: skip
_SHARED: Final = (Enum, type, types.ModuleType, logging.Logger)
_MAKE: Final[Callable[[type], object]] = object.__new__
# Sets attributes of frozen dataclasses too.
_SET: Final = object.__setattr__


class Copier:
    """Copies the objects of one kind of machine; what it learns about a class serves all later copies.

    ``shared``: further classes whose objects never change, or that copies may share although they do. ``copied``:
    opaque classes such as tensors, each with a function that copies an object. ``rebuilt``: classes whose objects
    cannot be filled later, each with a function that returns the objects inside, and one that builds a new object from
    the old one and the copies of those. ``uniform`` promises that the items of a list or of a long tuple are alike: if
    the last cannot change, none can.
    """

    def __init__(
        self,
        *,
        shared: Iterable[type] = (),
        copied: Mapping[type, _Shell] | None = None,
        rebuilt: Mapping[type, tuple[Callable[[Any], Iterable[object]], _Build]] | None = None,
        uniform: bool = False,
    ) -> None:
        self.atoms: set[type] = set(_ATOMS)
        self.planners: dict[type, _Planner] = dict(_UNIFORM_PLANNERS if uniform else _PLANNERS)
        self.shared = tuple(shared)
        self._shared = (*_SHARED, *self.shared)
        for kind, shell in (copied or {}).items():
            self.planners[kind] = _copying(shell)
        for kind, (items_of, build) in (rebuilt or {}).items():
            self.planners[kind] = _rebuilding(items_of, build)

    def share(self, *kinds: type) -> None:
        """Share the objects of further classes, which the harness itself keeps beside a machine."""
        self._shared = (*self._shared, *kinds)

    def planner_of(self, kind: type) -> _Planner | None:
        """Return the planner of a class; None if its objects never change."""
        if kind in self.atoms:
            return None
        planner = self.planners.get(kind)
        if planner is None:
            if issubclass(kind, self._shared) or _is_frozen(kind):
                self.atoms.add(kind)
                return None
            planner = self.planners[kind] = _planner_of(kind)
        return planner


class Frozen(Generic[_T]):
    """A snapshot of ``engine`` that never runs and can be thawed any number of times."""

    def __init__(self, engine: _T, copier: Copier) -> None:
        plan = _CopyList(copier)
        plan.add_all(engine)
        self._plan = plan
        # Later thaws copy the first one: the engine itself keeps running and changes.
        plan.sources = [
            new if made else kept for new, made, kept in zip(plan.thaw(), plan.made, plan.sources, strict=True)
        ]

    def thaw(self, name: str = "") -> _T:  # noqa: ARG002 - the name changes nothing
        """Make an engine that shares no mutable state with others and keeps the original's internal references."""
        engine: _T = self._plan.thaw()[0]
        return engine


class _CopyList:
    """The plan of a copy: every object by its place in one list, and the references to set between them.

    ``shells`` make each object from its entry in ``sources``, with its immutable contents; ``made``: the entry is an
    object to copy rather than an argument for making one.
    """

    def __init__(self, copier: Copier) -> None:
        self._copier = copier
        self._atoms = copier.atoms
        self.shells: list[_Shell] = []
        self.sources: list[object] = []
        self.made: list[bool] = []
        self._places: dict[int, int] = {}
        # Containers: the container's place, an index or a key, and the place of the item there.
        self._items: list[tuple[int, object, int]] = []
        # Objects: the object's place, the function that sets its attributes, and the places of their values.
        self._fills: list[tuple[int, _Fill, tuple[int, ...]]] = []
        # Sets and the like, filled last: their members must be complete to be hashed.
        self._late: list[tuple[int, _Build, list[object]]] = []
        # Objects whose attributes, and cells whose contents, are yet to be planned.
        self._instances: deque[tuple[int, object, tuple[str, ...]]] = deque()
        self._cells: deque[tuple[int, types.CellType]] = deque()
        # Objects that hold others and cannot be filled later, such as tuples.
        self._builds: list[tuple[int, _Build, object, list[object]]] = []

    def thaw(self) -> list[Any]:
        """Copy every object; the first is the engine."""
        try:
            new: list[Any] = list(map(call, self.shells, self.sources))
        except Exception as exc:
            raise HarnessError(self._copy_error()) from exc
        for place, build, what, items in self._builds:
            new[place] = build(what, [new[item.place] if type(item) is _At else item for item in items])
        for place, key, item in self._items:
            new[place][key] = new[item]
        for place, fill, places in self._fills:
            fill(new[place], new, places)
        for place, late, items in self._late:
            late(new[place], [new[item.place] if type(item) is _At else item for item in items])
        return new

    def _copy_error(self) -> str:
        for shell, source in zip(self.shells, self.sources, strict=True):
            try:
                shell(source)
            except Exception as exc:  # noqa: BLE001 - its text is reported
                kind = type(source)
                return (
                    f"the machine holds a {kind.__module__}.{kind.__qualname__}, which cannot be copied ({exc}); give "
                    "the adapter no copier, or Copier(shared=[...]) with the class if copies may share it"
                )
        return "a copy of the machine failed once and then succeeded; give the adapter no copier"

    def add(self, value: object) -> int | None:
        """Plan the copy of an object and return its place; None for an object that never changes and is shared."""
        kind = type(value)
        if kind in self._atoms:
            return None
        place = self._places.get(id(value))
        if place is not None:
            return place
        planner = self._copier.planner_of(kind)
        return None if planner is None else planner(self, value)

    def _append(self, value: object, shell: _Shell, source: object, *, made: bool = True) -> int:
        place = self._places[id(value)] = len(self.shells)
        self.shells.append(shell)
        self.sources.append(source)
        self.made.append(made)
        return place

    def _at(self, value: object) -> object:
        place = self.add(value)
        return value if place is None else _At(place)

    def add_list(self, value: list[object]) -> int:
        return self._indexed(value, list.copy, enumerate(value))

    def add_uniform_list(self, value: list[object]) -> int:
        if not value or type(value[-1]) in self._atoms:
            return self._append(value, list.copy, value)
        if type(value[-1]) is list:
            # Pages of KV: lists of numbers that nothing else refers to, and half of all that is copied.
            return self._append(value, _copy_lists, value)
        return self._indexed(value, list.copy, enumerate(value))

    def add_deque(self, value: deque[object]) -> int:
        return self._indexed(value, deque.copy, enumerate(value))

    def add_dict(self, value: dict[object, object]) -> int:
        if all(type(key) in self._atoms or self.add(key) is None for key in value):
            return self._indexed(value, dict.copy, value.items())
        place = self._append(value, _empty, dict, made=False)
        self._late.append((place, _fill_dict, [self._at(one) for one in (*value, *value.values())]))
        return place

    def _indexed(self, value: object, shell: _Shell, items: Iterable[tuple[object, object]]) -> int:
        place = self._append(value, shell, value)
        for key, item in items:
            if type(item) not in self._atoms:
                into = self.add(item)
                if into is not None:
                    self._items.append((place, key, into))
        return place

    def add_set(self, value: set[object]) -> int:
        members = [self._at(item) for item in value]
        if not any(type(item) is _At for item in members):
            return self._append(value, set.copy, value)
        place = self._append(value, _empty, set, made=False)
        self._late.append((place, set.update, members))
        return place

    def add_bytearray(self, value: bytearray) -> int:
        return self._append(value, bytearray.copy, value)

    def add_tuple(self, value: tuple[object, ...]) -> int | None:
        items = [self._at(item) for item in value]
        if not any(type(item) is _At for item in items):
            return None
        return self._built(value, _build_tuple, type(value), items)

    def add_uniform_tuple(self, value: tuple[object, ...]) -> int | None:
        # A mutable item is first or last, as in (last_used, id, node). Long tuples are token ids, and checking each
        # would take longer than everything else.
        if not value or (type(value[-1]) in self._atoms and type(value[0]) in self._atoms):
            return None
        return self.add_tuple(value)

    def add_function(self, value: types.FunctionType) -> int | None:
        """Plan a closure, which may refer to the machine; other functions never change."""
        if not value.__closure__ or "<locals>" not in value.__qualname__:
            return None
        return self._built(value, _build_function, value, [self._at(cell) for cell in value.__closure__])

    def add_cell(self, value: types.CellType) -> int:
        """Plan a cell. Its contents come later: they may be the very function whose closure it is in."""
        place = self._append(value, _new_cell, None, made=False)
        self._cells.append((place, value))
        return place

    def add_method(self, value: types.MethodType) -> int:
        return self._built(value, _build_method, value.__func__, [self._at(value.__self__)])

    def add_builtin(self, value: types.BuiltinFunctionType) -> int | None:
        """Plan a bound builtin, such as ``items.append``; a plain one, such as ``len``, never changes."""
        owner = value.__self__
        into = None if isinstance(owner, types.ModuleType | type) else self._at(owner)
        return self._built(value, _build_builtin, value.__name__, [into]) if type(into) is _At else None

    def add_partial(self, value: functools.partial[object]) -> int:
        parts = [value.func, *value.args, *(value.keywords.values())]
        names = tuple(value.keywords)
        return self._built(value, _build_partial, names, [self._at(part) for part in parts])

    def add_rebuilt(self, value: object, build: _Build, items: Iterable[object]) -> int:
        return self._built(value, build, value, [self._at(item) for item in items])

    def _built(self, value: object, build: _Build, what: object, items: list[object]) -> int:
        place = self._append(value, _nothing, None, made=False)
        self._builds.append((place, build, what, items))
        return place

    def add_container(self, value: _Container) -> int:
        """Plan an object of a subclass of a container: a shallow copy, then its items, then its attributes."""
        items: Iterable[tuple[object, object]] = ()
        if isinstance(value, dict):
            items = value.items()
        elif not isinstance(value, set):
            items = enumerate(value)
        place = self._indexed(value, _copy_container, items)
        for name, item in getattr(value, "__dict__", {}).items():
            into = self.add(item)
            if into is not None:
                self._fills.append((place, _filling(type(value), (name,)), (into,)))
        return place

    def add_opaque(self, value: object, shell: _Shell = copy.copy) -> int:
        """Plan an object without attributes, slots or items, such as an iterator: ``copy.copy`` copies it."""
        return self._append(value, shell, value)

    def add_instance(self, value: object, names: tuple[str, ...]) -> int:
        place = self._append(value, _nothing, value)
        # Attributes come later, without recursion: a chain of objects may be longer than the recursion limit.
        self._instances.append((place, value, names))
        return place

    def add_all(self, value: object) -> None:
        """Plan an object and everything that is reachable from it."""
        self.add(value)
        while self._instances or self._cells:
            if self._cells:
                place, cell = self._cells.popleft()
                if cell != types.CellType():
                    self._late.append((place, _fill_cell, [self._at(cell.cell_contents)]))
                continue
            place, instance, names = self._instances.popleft()
            into = {name: self.add(getattr(instance, name)) for name in names}
            copied = {name: at for name, at in into.items() if at is not None}
            shared = tuple([name for name in names if name not in copied])
            kind: type = type(instance)
            self.shells[place] = _instance(kind, shared)
            if copied:
                self._fills.append((place, _filling(kind, tuple(copied)), tuple(copied.values())))


class _At:
    """The place of a copied object, in a list that also has shared objects."""

    __slots__ = ("place",)

    def __init__(self, place: int) -> None:
        self.place = place


def _copy_lists(value: list[list[object]]) -> list[list[object]]:
    return [item.copy() for item in value]


def _copy_container(value: _Container) -> object:
    """Make a shallow copy of an object of a container's subclass without calling the subclass's constructor."""
    kind: Any = type(value)
    new = kind.__new__(kind)
    if isinstance(value, deque):
        deque.__init__(new, value, value.maxlen)
    elif isinstance(value, defaultdict):
        defaultdict.__init__(new, value.default_factory, value)
    elif isinstance(value, OrderedDict):
        OrderedDict.__init__(new, value)
    else:
        base: Any = next(base for base in (dict, list, set) if isinstance(value, base))
        base.__init__(new, value)
    for name, item in getattr(value, "__dict__", {}).items():
        _SET(new, name, item)
    return new


def _copy_struct(value: object) -> object:
    """Make a shallow copy of a struct; ``copy.copy`` leaves out attributes that are not fields."""
    new = copy.copy(value)
    for name, item in getattr(value, "__dict__", {}).items():
        setattr(new, name, item)
    return new


def _nothing(value: None) -> None:
    return value


def _new_cell(value: None) -> types.CellType:  # noqa: ARG001 - a shell takes its source
    return types.CellType()


def _empty(kind: type) -> object:
    return kind()


def _fill_cell(into: types.CellType, items: list[object]) -> None:
    (into.cell_contents,) = items


def _fill_dict(into: dict[object, object], items: list[object]) -> None:
    half = len(items) // 2
    into.update(zip(items[:half], items[half:], strict=True))


def _build_tuple(kind: Any, items: list[object]) -> object:
    """Build a tuple, a named tuple, whose class takes the fields one by one, or an object of another subclass."""
    if kind is tuple:
        return tuple(items)
    return kind._make(items) if hasattr(kind, "_make") else kind(items)


def _build_partial(names: tuple[str, ...], items: list[Any]) -> functools.partial[object]:
    positional = len(items) - len(names)
    function, *arguments = items[:positional]
    return functools.partial(function, *arguments, **dict(zip(names, items[positional:], strict=True)))


def _build_function(value: types.FunctionType, cells: list[types.CellType]) -> types.FunctionType:
    new = types.FunctionType(value.__code__, value.__globals__, value.__name__, value.__defaults__, tuple(cells))
    new.__kwdefaults__, new.__qualname__ = value.__kwdefaults__, value.__qualname__
    new.__dict__.update(value.__dict__)
    return new


def _build_builtin(name: str, items: list[object]) -> object:
    return getattr(items[0], name)


def _build_method(what: Callable[..., object], items: list[object]) -> types.MethodType:
    return types.MethodType(what, items[0])


def _copying(shell: _Shell) -> Callable[[_CopyList, object], int]:
    return lambda plan, value: plan.add_opaque(value, shell)


def _rebuilding(items_of: Callable[[Any], Iterable[object]], build: _Build) -> Callable[[_CopyList, object], int]:
    return lambda plan, value: plan.add_rebuilt(value, build, items_of(value))


_PLANNERS: Final[dict[type, _Planner]] = {
    list: _CopyList.add_list,
    tuple: _CopyList.add_tuple,
    dict: _CopyList.add_dict,
    set: _CopyList.add_set,
    deque: _CopyList.add_deque,
    bytearray: _CopyList.add_bytearray,
    types.FunctionType: _CopyList.add_function,
    types.CellType: _CopyList.add_cell,
    types.MethodType: _CopyList.add_method,
    types.BuiltinFunctionType: _CopyList.add_builtin,
    functools.partial: _CopyList.add_partial,
}
_UNIFORM_PLANNERS: Final = _PLANNERS | {list: _CopyList.add_uniform_list, tuple: _CopyList.add_uniform_tuple}


def _planner_of(kind: Any) -> _Planner:
    """Choose the planner of a class whose objects can change."""
    if issubclass(kind, tuple):
        return _CopyList.add_tuple
    if issubclass(kind, list | dict | set | deque):
        return _CopyList.add_container
    slots = slots_of(kind)
    if (not slots and not kind.__dictoffset__) or issubclass(kind, random.Random):
        return _CopyList.add_opaque
    return lambda plan, value: plan.add_instance(
        value, tuple(name for name in slots if hasattr(value, name)) + tuple(getattr(value, "__dict__", ()))
    )


def _is_struct(kind: Any) -> bool:
    return issubclass(kind, msgspec.Struct)


def _is_frozen(kind: Any) -> bool:
    return bool(_is_struct(kind) and kind.__struct_config__.frozen)


@functools.cache
def _is_plain(kind: type) -> bool:
    """Return whether objects of the class have plain attributes, unlike frozen dataclasses."""
    own = {name for base in kind.__mro__[:-1] for name in base.__dict__}
    return _is_struct(kind) or "__setattr__" not in own


@functools.cache
def _instance(kind: type, names: tuple[str, ...]) -> _Shell:
    """Generate a function that makes a new object with these attributes of the old one."""
    if _is_struct(kind):
        return _copy_struct
    # Attributes are set one by one: an object that is given a whole __dict__ is slower for the rest of its life. The
    # code is generated, as in dataclasses: a loop over the names takes four times as long.
    line = "    new.{0} = value.{0}" if _is_plain(kind) else "    put(new, {0!r}, value.{0})"
    lines = ["def copy(value):", "    new = make(kind)", *[line.format(name) for name in names], "    return new"]
    copy: _Shell = _written(lines, kind)
    return copy


@functools.cache
def _filling(kind: type, names: tuple[str, ...]) -> _Fill:
    """Generate a function that sets the attributes of an object whose values are copies, each from its place."""
    line = "    into.{0} = new[p{1}]" if _is_plain(kind) else "    put(into, {0!r}, new[p{1}])"
    lines = [line.format(name, number) for number, name in enumerate(names)]
    places = "".join(f"p{number}, " for number in range(len(names)))
    fill: _Fill = _written(["def copy(into, new, places):", f"    {places}= places", *lines], kind)
    return fill


def _written(lines: list[str], kind: type) -> Any:
    make = types.SimpleNamespace.__new__ if issubclass(kind, types.SimpleNamespace) else _MAKE
    scope: dict[str, Any] = {"make": make, "put": _SET, "kind": kind}
    exec("\n".join(lines), scope)  # noqa: S102 - names of attributes, which are identifiers
    return scope["copy"]
