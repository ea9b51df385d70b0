"""Encodes a script's arguments for the scheduler's process: plain values, which arrive with their types.

It never pickles.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from scripted.core.errors import BadCall

# Msgpack extensions: plain msgpack would turn tuples into lists and paths into strings.
_TUPLE: Final = 1
_PATH: Final = 2
_PATHS: Final = type(Path())
_LEAST_INT: Final = -(2**63)
_MOST_INT: Final = 2**64 - 1


def check_plain(arguments: Mapping[str, object]) -> None:
    """Raise BadCall, with the argument's name, for a value that would not arrive with its type."""
    for name, value in arguments.items():
        _check(name, value)


def packed(value: object) -> Any:
    if type(value) is tuple:
        return msgspec.msgpack.Ext(_TUPLE, msgspec.msgpack.encode([packed(one) for one in value]))
    if type(value) is _PATHS:
        return msgspec.msgpack.Ext(_PATH, bytes(value))
    if type(value) is list:
        return [packed(one) for one in value]
    if type(value) is dict:
        return {key: packed(one) for key, one in value.items()}
    return value


def unpacked(value: object) -> Any:
    if isinstance(value, msgspec.msgpack.Ext):
        if value.code == _PATH:
            return Path(os.fsdecode(bytes(value.data)))
        return tuple(unpacked(one) for one in msgspec.msgpack.decode(value.data))
    if isinstance(value, list):
        return [unpacked(one) for one in value]
    if isinstance(value, dict):
        return {key: unpacked(one) for key, one in value.items()}
    return value


def _check(where: str, value: object) -> None:
    kind = type(value)
    # By exact type: an object of a subclass would arrive as its base class.
    if isinstance(value, list | tuple) and kind in (list, tuple):
        for index, one in enumerate(value):
            _check(f"{where}[{index}]", one)
    elif isinstance(value, dict) and kind is dict:
        for key, one in value.items():
            if type(key) not in (str, int):
                raise BadCall(f"{where} has the key {key!r}, a {type(key).__name__}; use strings or whole numbers")
            _check(f"{where}[{key!r}]", one)
    elif isinstance(value, int) and kind is int:
        if not _LEAST_INT <= value <= _MOST_INT:
            raise BadCall(f"{where} is {value}, which has more than 64 bits and cannot travel; pass it as a string")
    elif value is not None and kind not in (bool, float, str, bytes, _PATHS):
        raise BadCall(
            f"{where} is a {kind.__name__}, which cannot travel to the scheduler process; pass numbers, strings, "
            "bytes, paths, None, lists, tuples or dicts (of an enum its .value, of a set a sorted list)"
        )
