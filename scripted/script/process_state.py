"""Detects whether a script has changed a process that others run in afterwards: in a server, the scheduler's.

Compares the code of engine and harness, the settings of the process, its threads and its children with earlier copies.
It restores nothing: a changed server is replaced.
"""

from __future__ import annotations

import decimal
import gc
import locale
import logging
import operator
import os
import resource
import signal
import socket
import sys
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Final

import msgspec

from scripted.core.installed import harness_packages
from scripted.script.child import children_of

_PACKAGES: Final = ("engine", "lockstep", *harness_packages())
# Packages whose modules are compared.
_NOTED: Final = frozenset((*_PACKAGES, *sys.stdlib_module_names))
_CODE: Final = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
_RLIMITS: Final = tuple({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})
_SIGNALS: Final = tuple(number for number in signal.valid_signals() if number < signal.SIGRTMIN)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _has_wakeup() -> int:
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def _of_torch() -> tuple[object, ...] | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    return torch.get_num_threads(), torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()


def _identity(descriptor: int) -> tuple[int, int] | None:
    try:
        status = os.fstat(descriptor)
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _working_folder() -> str | None:
    try:
        return os.getcwd()  # noqa: PTH109 - the value that is compared
    except OSError:
        return None


# State that all code in a process shares, by its name in reports.
_SETTINGS: Final[dict[str, Callable[[], object]]] = {
    "os.environ": lambda: dict(os.environ),
    "the working folder": _working_folder,
    "the umask": _umask,
    "sys.path": lambda: list(sys.path),
    "the standard files": lambda: [_identity(number) for number in range(3)],
    "the standard streams": lambda: [sys.stdin, sys.stdout, sys.stderr],
    "the garbage collector": lambda: (gc.isenabled(), gc.get_threshold(), gc.get_debug(), list(gc.callbacks)),
    "the recursion limit": sys.getrecursionlimit,
    "the filters of warnings": lambda: list(warnings.filters),
    "signal handlers": lambda: [signal.getsignal(number) for number in _SIGNALS],
    "the descriptor that signals write to": _has_wakeup,
    "blocked signals": lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    "timers": lambda: [signal.getitimer(which)[0] > 0 for which in (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL)],
    "logging": lambda: (logging.root.manager.disable, logging.root.level, list(logging.root.handlers)),
    "hooks of imports": lambda: (list(sys.meta_path), list(sys.path_hooks)),
    "trace functions": lambda: (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile()),
    "the digits of an integer": sys.get_int_max_str_digits,
    "the precision of decimals": lambda: decimal.getcontext().prec,
    "torch's settings": _of_torch,
    "the priority of the process": lambda: os.getpriority(os.PRIO_PROCESS, 0),
    "the CPUs of the process": lambda: os.sched_getaffinity(0),
    "limits of the process": lambda: [resource.getrlimit(number) for number in _RLIMITS],
    "the locale": lambda: locale.setlocale(locale.LC_ALL),
    "the time limit of sockets": socket.getdefaulttimeout,
    "the folder of temporary files": lambda: tempfile.tempdir,
}


class ProcessState:
    """The current state of this process. ``configs`` are objects that scripts share with others."""

    def __init__(self, configs: Iterable[object] = ()) -> None:
        self._settings = {name: read() for name, read in _SETTINGS.items()}
        self._configs = [(one, dict(vars(one))) for one in configs]
        self._threads = set(threading.enumerate())
        self._children = set(children_of(os.getpid()))
        self._modules = dict(sys.modules)
        self._code = _note_code()

    def changes(self) -> list[str]:
        """Name everything that has changed."""
        return [
            *(name for name, read in _SETTINGS.items() if not _is_same_setting(self._settings[name], read())),
            *("its configuration" for one, before in self._configs if vars(one) != before),
            *(f"sys.modules ({name})" for name, one in self._modules.items() if sys.modules.get(name) is not one),
            *(f"a thread, {one.name}, still runs" for one in threading.enumerate() if self._is_left(one)),
            *(f"a process, {pid}, still runs" for pid in children_of(os.getpid()) if pid not in self._children),
            *self._code.changes(),
        ]

    def _is_left(self, thread: threading.Thread) -> bool:
        code = getattr(thread, "_target", None) or getattr(thread, "function", None)
        package = (getattr(code or type(thread), "__module__", "") or "").partition(".")[0]
        return thread not in self._threads and package not in (*_PACKAGES, "concurrent", "asyncio")


def _is_same_setting(before: object, now: object) -> bool:
    return before is None or before == now  # None: not yet imported then


class _Code(msgspec.Struct, frozen=True):
    """Copies of the namespaces and tables of modules and classes, taken with ``modules`` modules imported."""

    modules: int
    owners: list[object]
    names: list[str]
    values: list[dict[str, object]]
    tables: list[tuple[str, object, object]]

    def changed(self) -> list[int]:
        """Return the numbers of changed namespaces. Comparing is fast: most values are the same objects."""
        same = list(map(operator.eq, map(vars, self.owners), self.values))
        return [number for number, is_same in enumerate(same) if not is_same]

    def changes(self) -> Iterator[str]:
        yield from (name for name, table, before in self.tables if table != before)
        for number in self.changed():
            owner, name, before = self.owners[number], self.names[number], self.values[number]
            now = vars(owner)
            for key in {**before, **now}:
                old, new = before.get(key), now.get(key)
                if old is not new and (_is_code(owner, key, old) or _is_of_a_script(new)):
                    yield f"{name}.{key}"


def _is_code(owner: object, key: str, value: object) -> bool:
    """Return whether a value is code or a constant; the engine's caches and counters change by themselves."""
    return isinstance(value, _CODE) or isinstance(owner, Enum) or (key.isupper() and not key.startswith("_"))


def _is_of_a_script(value: object) -> bool:
    while isinstance(value, (staticmethod, classmethod, property)):
        value = value.fget if isinstance(value, property) else value.__func__
    return isinstance(value, types.FunctionType) and not value.__module__.startswith(_PACKAGES)


# The copies for the last script: namespaces unchanged since then are not copied again.
_last_code: list[_Code] = []


def _note_code() -> _Code:
    if _last_code and _last_code[0].modules == len(sys.modules):
        (last,) = _last_code
        values = list(last.values)
        for number in last.changed():
            values[number] = vars(last.owners[number]).copy()
        noted = _Code(last.modules, last.owners, last.names, values, last.tables)
    else:
        owners, names = map(list, zip(*_find_owners(), strict=True))
        values = [vars(owner).copy() for owner in owners]
        noted = _Code(len(sys.modules), owners, names, values, list(_find_tables(owners, names)))
    _last_code[:] = [noted]
    return noted


def _find_owners() -> Iterator[tuple[object, str]]:
    """Yield modules of engine, harness and standard library; for the first two, also classes and enum members."""
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package not in _NOTED or not isinstance(module, types.ModuleType):
            continue
        yield module, name
        for value in list(vars(module).values()) if package in _PACKAGES else ():
            if isinstance(value, type) and value.__module__ == name:
                yield value, f"{name}.{value.__qualname__}"
                if issubclass(value, Enum):
                    yield from ((member, f"{name}.{member}") for member in value)


def _find_tables(owners: list[object], names: list[str]) -> Iterator[tuple[str, object, object]]:
    for owner, name in zip(owners, names, strict=True):
        if name.partition(".")[0] in _PACKAGES:
            for key, value in vars(owner).items():
                if key.isupper() and type(value) in (dict, list):
                    yield f"{name}.{key}", value, value.copy()
