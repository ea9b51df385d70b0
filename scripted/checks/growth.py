"""Nothing grows: an engine that is idle again is as small as it was when it was new.

Walks everything that can be reached from an object and notes how large each container is, by its path. It knows no
class: what the next registry is called does not matter.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Iterable
from enum import Enum
from typing import Any, Final

import msgspec

from engine.limits import Limits
from engine.scheduler import Scheduler
from scripted.checks.violation import Violation

__all__ = ["check_growth", "sizes_of"]

_CONTAINERS: Final = (dict, list, set, deque, bytearray)
_LEAVES: Final = (
    int, float, str, bytes, frozenset, type, Enum, msgspec.Struct, types.ModuleType, types.FunctionType,
    types.BuiltinFunctionType, types.MethodType, type(None),
)  # fmt: skip
# The replies of the last step, which the next one replaces, and the steps that a digest has not folded in yet, of which
# there are 256 at most.
_BOUNDED: Final = frozenset(("_replies", "_pending"))


def check_growth(scheduler: Scheduler) -> None:
    """An engine that is idle and flushed is no larger than a new one. Raises Violation that names what has grown."""
    before, now = _when_new(scheduler.limits), sizes_of(scheduler=scheduler)
    grown = [
        f"{path} has {size} entries, in a new engine {before.get(path, 0)}"
        for path, size in now.items()
        if size > before.get(path, 0)
    ]
    if grown:
        raise Violation(f"the engine is idle and flushed, but it has grown: {'; '.join(grown)}")


@functools.lru_cache(maxsize=256)
def _when_new(limits: Limits) -> dict[str, int]:
    return sizes_of(scheduler=Scheduler(limits))


def sizes_of(**roots: object) -> dict[str, int]:
    """Entries of every container that can be reached, by its shortest path; all inside one container share a path."""
    sizes: dict[str, int] = {}
    seen: set[int] = set()
    queue = deque((path, value) for path, value in roots.items() if _kind_of(type(value)) is not None)  # type: ignore[arg-type]
    while queue:
        path, value = queue.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        kind = _kind_of(type(value))  # type: ignore[arg-type]
        if kind is _Kind.CONTAINER:
            sizes[path] = sizes.get(path, 0) + len(value)  # type: ignore[arg-type]
        # Most of what is inside are numbers and names: they are left out here, before they have a path.
        queue.extend(
            [(f"{path}{name}", item) for name, item in _inside(value, kind) if _kind_of(type(item)) is not None]  # type: ignore[arg-type]
        )
    return sizes


class _Kind(Enum):
    CONTAINER = "container"
    TUPLE = "tuple"
    OBJECT = "object"


@functools.cache
def _kind_of(kind: Any) -> _Kind | None:
    """What to do with objects of a class; None for those that hold nothing that can change."""
    if issubclass(kind, _CONTAINERS):
        return _Kind.CONTAINER
    if issubclass(kind, tuple):
        return _Kind.TUPLE
    return None if issubclass(kind, _LEAVES) else _Kind.OBJECT


def _inside(value: Any, kind: _Kind | None) -> Iterable[tuple[str, object]]:
    """What an object holds, each with what its path has beyond that of the object."""
    if kind is _Kind.OBJECT:
        own = getattr(value, "__dict__", {})
        return [
            *[(f".{name}", getattr(value, name)) for name in _slots_of(type(value)) if hasattr(value, name)],  # type: ignore[arg-type]
            *[(f".{name}", item) for name, item in own.items() if name not in _BOUNDED],
        ]
    if not value or isinstance(value, bytearray):
        return ()
    if isinstance(value, dict):
        return [("[]", item) for pair in value.items() for item in pair]
    return [("[]", item) for item in value]


@functools.cache
def _slots_of(kind: Any) -> tuple[str, ...]:
    slots = [base.__dict__.get("__slots__", ()) for base in kind.__mro__]
    every = (name for names in slots for name in ((names,) if isinstance(names, str) else names))
    return tuple(name for name in every if name not in _BOUNDED)
