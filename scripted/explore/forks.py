"""Forks: a copy of a running engine, made many times faster than ``copy.deepcopy`` would.

Copies by structure, knowing no class but those that hold what changes inside frozen shells; frozen structs are shared.
"""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Final, TypeVar

import msgspec

from engine.scheduler import Launched

__all__ = ["fork"]

_T = TypeVar("_T")
_Memo = dict[int, Any]
_Copier = Callable[[Any, _Memo], Any]

_ATOMS: Final[set[type]] = {
    int, float, bool, str, bytes, type(None), type, frozenset, types.FunctionType, types.BuiltinFunctionType
}  # fmt: skip


def fork(engine: _T) -> _T:
    """A copy that shares nothing that can change. What is inside refers to itself as in the original."""
    return _copy(engine, {})  # type: ignore[no-any-return]


def _copy(value: Any, memo: _Memo) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    found = memo.get(id(value))
    if found is not None:
        return found
    copier = _COPIERS.get(kind)
    if copier is None:
        copier = _copier_of(kind)
        if copier is None:
            _ATOMS.add(kind)
            return value
        _COPIERS[kind] = copier
    return copier(value, memo)


def _copy_list(value: list[Any], memo: _Memo) -> list[Any]:
    # Lists are uniform: when the last item cannot change, none can.
    if not value or type(value[-1]) in _ATOMS:
        new = value.copy()
        memo[id(value)] = new
        return new
    new = memo[id(value)] = []
    if type(value[-1]) is list:
        # The pages of KV: lists of numbers that nobody else refers to, and half of all that there is to copy.
        new += [item.copy() for item in value]
    else:
        new += [_copy(item, memo) for item in value]
    return new


def _copy_tuple(value: tuple[Any, ...], memo: _Memo) -> tuple[Any, ...]:
    # What changes is first or last in the tuples here: (last_used, id, node) in the heap, (node, pages) in the audit.
    # Long ones are token ids, and to look at each of those would take longer than all the rest.
    if not value or (type(value[-1]) in _ATOMS and type(value[0]) in _ATOMS):
        return value
    return tuple([item if type(item) in _ATOMS else _copy(item, memo) for item in value])


def _copy_dict(value: dict[Any, Any], memo: _Memo) -> dict[Any, Any]:
    new: dict[Any, Any] = {}
    memo[id(value)] = new
    if not value:
        return new
    for key, item in value.items():
        new[key if type(key) in _ATOMS else _copy(key, memo)] = item if type(item) in _ATOMS else _copy(item, memo)
    return new


def _copy_set(value: set[Any], memo: _Memo) -> set[Any]:
    new = memo[id(value)] = {_copy(item, memo) for item in value}
    return new


def _copy_deque(value: deque[Any], memo: _Memo) -> deque[Any]:
    new: deque[Any] = deque(maxlen=value.maxlen)
    memo[id(value)] = new
    if value:
        new.extend([item if type(item) in _ATOMS else _copy(item, memo) for item in value])
    return new


def _copy_bytearray(value: bytearray, memo: _Memo) -> bytearray:
    new = memo[id(value)] = value.copy()
    return new


def _copy_method(value: types.MethodType, memo: _Memo) -> types.MethodType:
    return types.MethodType(value.__func__, _copy(value.__self__, memo))


def _copy_launched(value: Launched, memo: _Memo) -> Launched:
    # Frozen itself, but its requests are the live ones.
    new = Launched(value.microbatch, tuple([_copy(request, memo) for request in value.requests]), value.step)
    memo[id(value)] = new
    return new


_COPIERS: Final[dict[type, _Copier]] = {
    list: _copy_list,
    tuple: _copy_tuple,
    dict: _copy_dict,
    set: _copy_set,
    deque: _copy_deque,
    bytearray: _copy_bytearray,
    types.MethodType: _copy_method,
    Launched: _copy_launched,
}


def _copier_of(kind: type) -> _Copier | None:
    """How to copy objects of a class; None when they never change."""
    if issubclass(kind, msgspec.Struct | Enum | type):
        return None
    slots = tuple(name for base in kind.__mro__ for name in getattr(base, "__slots__", ()))
    return _slots_copier(kind, slots) if slots else _dict_copier(kind)


def _slots_copier(kind: type, slots: tuple[str, ...]) -> _Copier:
    make: Callable[[type], Any] = object.__new__

    def copy(value: Any, memo: _Memo) -> Any:
        new = memo[id(value)] = make(kind)
        for name in slots:
            item = getattr(value, name)
            setattr(new, name, item if type(item) in _ATOMS else _copy(item, memo))
        return new

    return copy


def _dict_copier(kind: type) -> _Copier:
    make: Callable[[type], Any] = object.__new__

    def copy(value: Any, memo: _Memo) -> Any:
        new = memo[id(value)] = make(kind)
        new.__dict__ = {
            name: item if type(item) in _ATOMS else _copy(item, memo) for name, item in value.__dict__.items()
        }
        return new

    return copy
