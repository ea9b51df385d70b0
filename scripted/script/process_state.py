"""What a script can change in its process for everything that runs there after it: noted before, compared, put back.

The code of engine and harness, the environment, signals, limits, the garbage collector, warnings, threads, descriptors.
It knows no scheduler.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import os
import random
import resource
import signal
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec

__all__ = ["LeftChanged", "ProcessState"]

_PACKAGES: Final = ("engine", "scripted")
_OTHERS: Final = (builtins, os, random, signal, threading, time)
_CODE: Final = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
# Those of real time have no use in a test.
_SIGNALS: Final = tuple(number for number in signal.valid_signals() if number < getattr(signal, "SIGRTMIN", 32))
# A thread that was told to end is given this long.
_THREAD_END_S: Final = 0.2


class LeftChanged(AssertionError):
    """A script came to its end and left its process changed, for all that runs there after it."""

    is_meant_for_the_script = True

    def __init__(self, changes: list[str]) -> None:
        super().__init__(
            f"the script left its process changed: {'; '.join(changes)}; put it back in a finally, or leave it alone"
        )


class _Part(msgspec.Struct, frozen=True):
    """One value of the process: how it is read, and how it is written back."""

    name: str
    read: Callable[[], Any]
    write: Callable[[Any], object]


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _read_handlers() -> dict[int, Any]:
    return {number: signal.getsignal(number) for number in _SIGNALS}


def _write_handlers(before: dict[int, Any]) -> None:
    for number, handler in before.items():
        if signal.getsignal(number) is not handler and handler is not None:
            signal.signal(number, handler)


def _write_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]  # noqa: SLF001 - what the module itself calls


def _write_gc(before: tuple[bool, tuple[int, int, int]]) -> None:
    (gc.enable if before[0] else gc.disable)()
    gc.set_threshold(*before[1])


def _read_limits() -> dict[int, tuple[int, int]]:
    return {number: resource.getrlimit(number) for number in (resource.RLIMIT_NOFILE, resource.RLIMIT_AS)}


def _write_limits(before: dict[int, tuple[int, int]]) -> None:
    for number, limits in before.items():
        resource.setrlimit(number, limits)


_PARTS: Final = (
    _Part("os.environ", lambda: dict(os.environ), _write_environment),
    _Part("the working folder", os.getcwd, os.chdir),
    _Part("the umask", _read_umask, os.umask),
    _Part("sys.path", lambda: list(sys.path), lambda before: sys.path.__setitem__(slice(None), before)),
    _Part("the garbage collector", lambda: (gc.isenabled(), gc.get_threshold()), _write_gc),
    _Part("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit),
    _Part("the switch interval", sys.getswitchinterval, sys.setswitchinterval),
    _Part("the filters of warnings", lambda: list(warnings.filters), _write_filters),
    _Part("signal handlers", _read_handlers, _write_handlers),
    _Part("limits of the process", _read_limits, _write_limits),
)


class ProcessState:
    """The state of this process now. Copies of its ``descriptors`` keep connections open: not beside real clients."""

    def __init__(self, *, descriptors: bool) -> None:
        self._values = {part.name: part.read() for part in _PARTS}
        self._threads = set(threading.enumerate())
        self._descriptors = _Descriptors() if descriptors else None
        self._code = {id(owner): (owner, name, vars(owner).copy()) for owner, name in _owners()}

    def put_back(self) -> list[str]:
        """Put everything back that differs from what was noted; says what it was."""
        changes = [*self._code_changes(), *self._value_changes(), *self._thread_changes()]
        return changes if self._descriptors is None else changes + self._descriptors.put_back()

    def _value_changes(self) -> Iterator[str]:
        for part in _PARTS:
            before = self._values[part.name]
            try:
                now = part.read()
            except OSError:  # the working folder is gone
                now = None
            if now != before:
                with contextlib.suppress(OSError, ValueError):
                    part.write(before)
                yield f"{part.name}{_difference(before, now)}"

    def _code_changes(self) -> Iterator[str]:
        for owner, name, before in self._code.values():
            now = vars(owner)
            if now == before:  # in most of them every value is the same object, which is seen at once
                continue
            for key, value in before.items():
                if now.get(key, self) is not value and _is_of_interest(owner, key, value):
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(owner, key, value)
                        yield f"{name}.{key}"
            for key in [key for key in now if key not in before]:
                if isinstance(now[key], _CODE) and not key.startswith("__"):
                    with contextlib.suppress(AttributeError, TypeError):
                        delattr(owner, key)
                        yield f"{name}.{key}, which is new"

    def _thread_changes(self) -> Iterator[str]:
        for thread in set(threading.enumerate()) - self._threads:
            target = getattr(thread, "_target", None)
            if target is None or (target.__module__ or "").partition(".")[0] in (*_PACKAGES, "concurrent"):
                continue
            thread.join(_THREAD_END_S)
            if thread.is_alive():
                yield f"a thread, {thread.name}, still runs"


class _Descriptors:
    """Open descriptors, each with a copy: one that a script closes or replaces is put back."""

    def __init__(self) -> None:
        before = {}
        for number in _open_descriptors():
            with contextlib.suppress(OSError):  # one was that of the folder itself
                before[number] = _identity(number)
        self._copies = {number: (identity, os.dup(number)) for number, identity in before.items()}

    def put_back(self) -> list[str]:
        """Close the copies; says which descriptors were closed or replaced."""
        changes = []
        for number, (before, copy) in self._copies.items():
            try:
                now = _identity(number)
            except OSError:
                now = None
            if now != before:
                os.dup2(copy, number, inheritable=False)
                changes.append(f"descriptor {number} was closed or replaced")
            os.close(copy)
        return changes


def _open_descriptors() -> list[int]:
    try:
        return [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - no path is needed of them
    except OSError:
        return [0, 1, 2]


def _identity(number: int) -> tuple[int, int]:
    status = os.fstat(number)
    return status.st_dev, status.st_ino


def _owners() -> list[tuple[Any, str]]:
    """The modules of engine and harness, the classes in them, and modules of Python that keep the process's state."""
    if _owners_by_modules.get(len(sys.modules)) is None:
        _owners_by_modules.clear()
        _owners_by_modules[len(sys.modules)] = list(_find_owners())
    return _owners_by_modules[len(sys.modules)]


# They are looked for anew when modules have been imported.
_owners_by_modules: Final[dict[int, list[tuple[Any, str]]]] = {}


def _find_owners() -> Iterator[tuple[Any, str]]:
    for module in _OTHERS:
        yield module, module.__name__
    for name, module in list(sys.modules.items()):
        if module is not None and name.partition(".")[0] in _PACKAGES:
            yield module, name
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__ == name:
                    yield value, f"{name}.{value.__qualname__}"


def _is_of_interest(owner: object, key: str, value: object) -> bool:
    """Code everywhere, and the constants of the engine's modules; counters and caches of the harness change."""
    if isinstance(value, _CODE) or (isinstance(owner, type) and not key.startswith("__") and callable(value)):
        return True
    is_engine = isinstance(owner, types.ModuleType) and owner.__name__.partition(".")[0] == "engine"
    return is_engine and key.isupper()


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key, _difference) != now.get(key, _difference)]
        return f" ({', '.join(map(str, keys))})"
    return f" ({now})" if isinstance(now, (str, int, float)) else ""
