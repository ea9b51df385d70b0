"""Measures all containers that are reachable from an object, by path: the harness compares sizes to find leaks.

It knows no classes, so a new registry needs no entry anywhere. It changes no object.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any, Final

import msgspec

from scripted.core.states import slots_of

_CONTAINERS: Final = (dict, list, set, deque, bytearray)
_LEAVES: Final = (
    int, float, str, bytes, frozenset, type, Enum, msgspec.Struct, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, type(None),
)  # fmt: skip
# Bounded anyway: the replies of the last step, which the next step replaces, and at most 256 steps that are not yet in
# the digests.
_BOUNDED: Final = frozenset(("_replies", "_pending", "_pending_plans"))
# Packages whose objects are not looked into: a model's modules, a tensor's storage, a socket.
_FOREIGN: Final = frozenset(
    ("torch", "transformers", "transformers_modules", "numpy", "zmq", "socket", "threading", "logging", "pathlib")
)


def sizes_of(*leaves: type, **roots: object) -> dict[str, int]:
    """Count the entries of every reachable container by shortest path; the items of one container share a path.

    Objects of the classes ``leaves`` are not looked into.
    """
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    kinds, queue = _KINDS, [*roots.items()]
    value: Any
    for path, value in queue:  # The queue grows meanwhile.
        of: type = type(value)
        kind = kinds[of]
        if kind is None or id(value) in seen or (leaves and _is_leaf(of, leaves)):
            continue
        seen.add(id(value))
        if kind is _OBJECT:
            # Most attributes are numbers and text: skip them before a path is built for them.
            queue += [(f"{path}.{name}", item) for name, item in _attributes(value) if kinds[type(item)] is not None]
            continue
        if kind is _CONTAINER:
            sizes[path] = sizes.get(path, 0) + len(value)
        queue += [(f"{path}[]", item) for item in _items(value) if kinds[type(item)] is not None]
    return sizes


def grown(before: Mapping[str, int], now: Mapping[str, int], when: str) -> dict[str, str]:
    """Describe each container with more entries than before, by path; ``when`` names the time of ``before``."""
    return {
        path: f"{path} has {size} entries, {when} {before.get(path, 0)}"
        for path, size in now.items()
        if size > before.get(path, 0)
    }


@functools.cache
def _is_leaf(kind: type, leaves: tuple[type, ...]) -> bool:
    """Return whether a class is a leaf. Cached: ``issubclass`` of an abstract class costs more than everything else."""
    return issubclass(kind, leaves)


class _Kind(Enum):
    CONTAINER = "container"
    TUPLE = "tuple"
    OBJECT = "object"


_CONTAINER: Final = _Kind.CONTAINER
_OBJECT: Final = _Kind.OBJECT


class _Kinds(dict[type, _Kind | None]):
    """The kind of a class's objects, computed on demand; None for objects that hold nothing mutable."""

    def __missing__(self, kind: type) -> _Kind | None:
        if issubclass(kind, _CONTAINERS):
            found: _Kind | None = _Kind.CONTAINER
        elif issubclass(kind, tuple):
            found = _Kind.TUPLE
        else:
            is_leaf = issubclass(kind, _LEAVES) or kind.__module__.partition(".")[0] in _FOREIGN
            found = None if is_leaf else _Kind.OBJECT
        self[kind] = found
        return found


_KINDS: Final = _Kinds()


def _items(value: Any) -> Iterable[object]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return () if isinstance(value, bytearray) else value


def _attributes(value: object) -> Iterable[tuple[str, object]]:
    kind: type = type(value)
    slots, own = slots_of(kind), getattr(value, "__dict__", {})
    if not slots and own.keys().isdisjoint(_BOUNDED):
        return own.items()
    held = [*[(name, getattr(value, name)) for name in slots if hasattr(value, name)], *own.items()]
    return [(name, item) for name, item in held if name not in _BOUNDED]
