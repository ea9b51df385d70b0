"""What a script can change in its process for everything that runs there after it: noted before, compared, put back.

The code of engine and harness, the environment, signals, limits, the garbage collector, warnings, threads, descriptors.
It knows no scheduler.
"""

from __future__ import annotations

import atexit
import builtins
import codecs
import contextlib
import ctypes
import decimal
import faulthandler
import functools
import gc
import importlib
import locale
import logging
import operator
import os
import random
import resource
import signal
import socket
import sys
import sysconfig
import tempfile
import threading
import types
import warnings
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Final

import msgspec

from scripted.core.errors import BadCall
from scripted.core.installed import harness_folders, harness_packages
from scripted.script.open_files import STANDARD_FILES, Descriptors, Streams

_PACKAGES: Final = ("engine", "lockstep", *harness_packages())
_RUNNERS: Final = ("_pytest", "pluggy")
# Beside those of Python itself.
_ALSO: Final = frozenset({"fastapi", "httpx", "numpy", "numpy.random", "pydantic", "starlette", "torch", "uvicorn"})
_CODEC_ERRORS: Final = ("backslashreplace", "ignore", "replace", "strict", "surrogateescape", "xmlcharrefreplace")
# Their classes are noted too.
_OTHERS: Final = tuple(map(importlib.import_module, (
    "ast", "asyncio", "builtins", "collections", "contextlib", "copy", "dataclasses", "decimal", "functools", "gc",
    "inspect", "io", "itertools", "json", "linecache", "logging", "math", "msgspec", "msgspec.json", "msgspec.msgpack",
    "msgspec.structs", "operator", "os", "pathlib", "random", "re", "shutil", "signal", "socket", "subprocess", "sys",
    "tempfile", "threading", "time", "traceback", "types", "warnings",
)))  # fmt: skip
_LIBRARIES: Final = tuple(
    {
        *map(sysconfig.get_path, ("stdlib", "platstdlib", "purelib", "platlib")),
        *(folder.rstrip(os.sep) for folder in harness_folders()),
    }
)
_BUILTINS: Final = vars(builtins)
_CODE: Final = (types.FunctionType, types.BuiltinFunctionType, type, staticmethod, classmethod, property)
# Those of real time have no use in a test.
_SIGNALS: Final = tuple(number for number in signal.valid_signals() if number < getattr(signal, "SIGRTMIN", 32))
# A thread that was told to end is given this long.
_THREAD_END_S: Final = 0.2
_MOST_NAMED: Final = 3
_RLIMITS: Final = tuple({number for name, number in vars(resource).items() if name.startswith("RLIMIT_")})

# What was registered with atexit beside a script, and by which file; Python has no list of what was.
_at_exit: Final[list[tuple[Any, str]]] = []
_register: Final = atexit.register
# Nobody can take back what is given to these.
_FOR_EVER: Final = ((sys, "addaudithook"), (os, "register_at_fork"))


def _note_at_exit(function: Any, *arguments: Any, **named: Any) -> Any:
    _at_exit.append((function, sys._getframe(1).f_code.co_filename))  # noqa: SLF001
    return _register(function, *arguments, **named)


def _refused(owner: Any, name: str) -> Callable[..., Any]:
    function = getattr(owner, name)

    @functools.wraps(function)
    def refused(*arguments: Any, **named: Any) -> Any:
        if not _is_of_a_library(sys._getframe(1).f_code.co_filename):  # noqa: SLF001
            what = f"{owner.__name__}.{name}"
            raise BadCall(f"{what} cannot be taken back, and would be there for all that runs later; leave it alone")
        return function(*arguments, **named)

    return refused


class LeftChanged(AssertionError):
    """A script came to its end and left its process changed, for all that runs there after it."""

    is_meant_for_the_script = True

    def __init__(self, changes: list[str]) -> None:
        super().__init__(
            f"the script left its process changed: {'; '.join(changes)}; put it back in a finally, or leave it alone"
        )


class _Setting(msgspec.Struct, frozen=True):
    """One value of the process: how it is read, and how it is written back."""

    read: Callable[[], Any]
    write: Callable[[Any], object]


# What a setting of a library is before that is imported.
_NOT_IMPORTED: Final = object()


def _attribute(owner: Any, name: str) -> _Setting:
    return _Setting(functools.partial(getattr, owner, name), functools.partial(setattr, owner, name))


def _items(owner: Any, name: str) -> _Setting:
    """What is in a list, which stays the same list."""

    def write(before: list[Any]) -> None:
        getattr(owner, name)[:] = before

    return _Setting(lambda: list(getattr(owner, name)), write)


def _each(keys: Iterable[Any], read: Callable[..., Any], write: Callable[..., Any]) -> dict[str, _Setting]:
    return {str(key): _Setting(functools.partial(read, key), functools.partial(write, key)) for key in keys}


def _imported(library: str, read: str, write: str) -> _Setting:
    """Two functions of a library that a script may be the first to import."""

    def write_back(before: Any) -> None:
        setter = getattr(sys.modules[library], write)
        setter(**before) if isinstance(before, dict) else setter(before)

    return _Setting(
        lambda: getattr(sys.modules[library], read)() if library in sys.modules else _NOT_IMPORTED, write_back
    )


def _read_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _write_handler(number: int, before: Any) -> None:
    if before is not None:
        signal.signal(number, before)


def _write_filters(before: list[Any]) -> None:
    warnings.filters[:] = before  # type: ignore[index]
    warnings._filters_mutated()  # type: ignore[attr-defined]  # noqa: SLF001 - what the module itself calls


def _random_states() -> list[tuple[Callable[[Any], None], Any]]:
    """The generators that all code shares, each with what sets it: they go on, so that nobody can tell who drew."""
    shared: Any = sys.modules.get("numpy.random")
    states: list[tuple[Callable[[Any], None], Any]] = [(random.setstate, random.getstate())]
    return states if shared is None else [*states, (shared.set_state, shared.get_state())]


def _read_wakeup() -> int:
    number = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(number)
    return number


def _is_timer_set(which: int) -> bool:
    """How far it is changes by itself."""
    return signal.getitimer(which)[0] > 0


def _write_timer(which: int, was_set: bool) -> None:
    if not was_set:
        signal.setitimer(which, 0)


# By what a report calls them; several of one name by what tells them apart.
_PARTS: Final[dict[str, _Setting | dict[str, _Setting]]] = {
    "os.environ": _Setting(lambda: dict(os.environ), _write_environment),
    "the working folder": _Setting(os.getcwd, os.chdir),
    "the umask": _Setting(_read_umask, os.umask),
    "sys.path": _items(sys, "path"),
    "the garbage collector": {
        "on": _Setting(gc.isenabled, lambda before: (gc.enable if before else gc.disable)()),
        "threshold": _Setting(gc.get_threshold, lambda before: gc.set_threshold(*before)),
        "debug": _Setting(gc.get_debug, gc.set_debug),
    },
    "the recursion limit": _Setting(sys.getrecursionlimit, sys.setrecursionlimit),
    "the switch interval": _Setting(sys.getswitchinterval, sys.setswitchinterval),
    "the filters of warnings": _Setting(lambda: list(warnings.filters), _write_filters),
    "signal handlers": _each(_SIGNALS, signal.getsignal, _write_handler),
    "the descriptor that signals write to": _Setting(_read_wakeup, signal.set_wakeup_fd),
    "timers": _each((signal.ITIMER_REAL, signal.ITIMER_VIRTUAL), _is_timer_set, _write_timer),
    "blocked signals": _Setting(
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda before: signal.pthread_sigmask(signal.SIG_SETMASK, before),
    ),
    "logging": {
        "disabled": _Setting(lambda: logging.root.manager.disable, logging.disable),
        "level": _Setting(lambda: logging.root.level, logging.root.setLevel),
        "handlers": _items(logging.root, "handlers"),
    },
    "sys.stdout and its like": {name: _attribute(sys, name) for name in ("stdin", "stdout", "stderr")},
    "hooks of imports": {name: _items(sys, name) for name in ("meta_path", "path_hooks")},
    "trace functions": {
        "sys.settrace": _Setting(sys.gettrace, sys.settrace),
        "sys.setprofile": _Setting(sys.getprofile, sys.setprofile),
        "threading.settrace": _Setting(threading.gettrace, threading.settrace),
        "threading.setprofile": _Setting(threading.getprofile, threading.setprofile),
    },
    "the digits of an integer": _Setting(sys.get_int_max_str_digits, sys.set_int_max_str_digits),
    "the precision of decimals": _Setting(
        lambda: decimal.getcontext().prec, lambda before: setattr(decimal.getcontext(), "prec", before)
    ),
    "torch's settings": {
        "threads": _imported("torch", "get_num_threads", "set_num_threads"),
        "dtype": _imported("torch", "get_default_dtype", "set_default_dtype"),
        "device": _imported("torch", "get_default_device", "set_default_device"),
        "gradients": _imported("torch", "is_grad_enabled", "set_grad_enabled"),
        "determinism": _imported("torch", "are_deterministic_algorithms_enabled", "use_deterministic_algorithms"),
    },
    "numpy's settings": {
        "errors": _imported("numpy", "geterr", "seterr"),
        "printing": _imported("numpy", "get_printoptions", "set_printoptions"),
    },
    "callbacks of the collector": _items(gc, "callbacks"),
    "the priority of the process": _Setting(
        lambda: os.getpriority(os.PRIO_PROCESS, 0), lambda before: os.setpriority(os.PRIO_PROCESS, 0, before)
    ),
    "the CPUs of the process": _Setting(
        lambda: os.sched_getaffinity(0), lambda before: os.sched_setaffinity(0, before)
    ),
    "limits of the process": _each(_RLIMITS, resource.getrlimit, resource.setrlimit),
    "the locale": _Setting(
        lambda: locale.setlocale(locale.LC_ALL), lambda before: locale.setlocale(locale.LC_ALL, before)
    ),
    "the time limit of sockets": _Setting(socket.getdefaulttimeout, socket.setdefaulttimeout),
    "the stack of threads": _Setting(threading.stack_size, threading.stack_size),
    "the codecs' error handlers": _each(_CODEC_ERRORS, codecs.lookup_error, codecs.register_error),
    "the folder of temporary files": _attribute(tempfile, "tempdir"),
}


# What torch has when it is first imported.
_OF_TORCH: Final[dict[str, Callable[[Any], Any]]] = {
    "dtype": lambda torch: torch.float32,
    "device": lambda torch: torch.device("cpu"),
    "gradients": lambda _: True,
    "determinism": lambda _: False,
}


def _settings() -> Iterator[tuple[str, str, _Setting]]:
    for name, part in _PARTS.items():
        if isinstance(part, _Setting):
            yield name, "", part
        else:
            yield from ((name, key, setting) for key, setting in part.items())


class ProcessState:
    """The state of this process now.

    Of open descriptors there are copies, which keep connections open: with ``standard_files`` of those three alone,
    beside real clients. ``settings`` are what a script may have in common with others.
    """

    def __init__(self, *, standard_files: bool = False, settings: Iterable[Any] = ()) -> None:
        self._builtins = dict(_BUILTINS)
        self._settings = [(one, dict(vars(one))) for one in {id(one): one for one in settings}.values()]
        self._values = {(name, key): setting.read() for name, key, setting in _settings()}
        self._random_states = _random_states()
        self._threads = set(threading.enumerate())
        self._streams = Streams()
        self._modules = dict(sys.modules)
        self._children = _children()
        self._code = _note_code()
        self._handlers_before = len(_at_exit)
        self._hook_before = sys.unraisablehook
        self._descriptors = Descriptors(STANDARD_FILES if standard_files else None)
        instead = [
            (atexit, "register", _note_at_exit),
            (os, "close", self._descriptors.close_one),
            (os, "closerange", self._descriptors.close_range),
            (os, "dup2", self._descriptors.duplicate),
            (sys, "unraisablehook", self._note_unraisable),
            *((owner, name, _refused(owner, name)) for owner, name in _FOR_EVER),
        ]
        self._unraisable: list[str] = []
        self._swapped = [(owner, name, getattr(owner, name), one) for owner, name, one in instead]
        for owner, name, _before, one in self._swapped:
            setattr(owner, name, one)

    def put_back(self) -> list[str]:
        """Put everything back that differs from what was noted; says what it was."""
        # First, by an operation of a dict alone: all that follows calls them.
        changes = [f"builtins.{name}" for name, one in self._builtins.items() if _BUILTINS.get(name) is not one]
        _BUILTINS.update(self._builtins)
        changes += [f"{owner.__name__}.{name}" for owner, name, _, one in self._swapped if getattr(owner, name) != one]
        for owner, name, before, _one in self._swapped:
            setattr(owner, name, before)
        for set_state, state in self._random_states:
            set_state(state)
        faulthandler.cancel_dump_traceback_later()  # it could not be seen, and may end the process
        changes += [*self._module_changes(), *self._code_changes(), *self._value_changes(), *self._thread_changes()]
        changes += [*self._exit_changes(), *self._child_changes(), *self._setting_changes()]
        changes += self._unraisable
        return changes + self._streams.put_back() + self._descriptors.put_back()

    def _setting_changes(self) -> Iterator[str]:
        for settings, before in self._settings:
            now = vars(settings)
            if now != before:
                yield f"its configuration ({_difference(before, dict(now))})"
                now.clear()
                now.update(before)

    def _note_unraisable(self, lost: Any) -> None:
        """Note what was raised where nobody can catch it, in code of the script; nothing is kept of the object."""
        code = None if lost.exc_traceback is None else lost.exc_traceback.tb_frame.f_code
        if code is None or _is_of_a_library(code.co_filename):
            self._hook_before(lost)
        else:
            self._unraisable.append(f"{code.co_qualname} raised {lost.exc_type.__name__} where nothing can catch it")

    def _exit_changes(self) -> Iterator[str]:
        new, _at_exit[self._handlers_before :] = _at_exit[self._handlers_before :], []
        for function, file in new:
            if not _is_of_a_library(file):
                atexit.unregister(function)
                yield f"an exit handler, {getattr(function, '__qualname__', function)}"

    def _child_changes(self) -> Iterator[str]:
        for pid in _children() - self._children:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                yield f"a process, {pid}, still runs"

    def _module_changes(self) -> Iterator[str]:
        now = sys.modules
        changed = [name for name, module in self._modules.items() if now.get(name, self) is not module]
        changed += [name for name in now if now[name] is None and name not in self._modules]
        for name in changed:
            if name in self._modules:
                now[name] = self._modules[name]
            else:
                del now[name]
            yield f"sys.modules ({name})"

    def _value_changes(self) -> Iterator[str]:
        changed: dict[str, list[str]] = {}
        for name, key, setting in _settings():
            before = self._values[name, key]
            try:
                now = setting.read()
            except OSError:  # the working folder is gone
                now = None
            if before is _NOT_IMPORTED and now is not before:
                before = _OF_TORCH[key](sys.modules["torch"]) if key in _OF_TORCH else now
            if now != before:
                with contextlib.suppress(OSError, ValueError):
                    setting.write(before)
                changed.setdefault(name, []).append(key or _difference(before, now))
        yield from (f"{name} ({', '.join(words)})" if any(words) else name for name, words in changed.items())

    def _code_changes(self) -> Iterator[str]:
        for name, table, before in self._code.changed_tables():
            table.clear()
            (table.update if isinstance(table, dict) else table.extend)(before)
            yield name
        for number in self._code.changed():
            owner, name, before = self._code.owners[number], self._code.names[number], self._code.values[number]
            now = vars(owner)
            if isinstance(owner, types.ModuleType) and (lost := before.keys() - now.keys()):
                now.update({key: before[key] for key in lost})
                yield f"{name} ({', '.join(sorted(lost)[:_MOST_NAMED])}: deleted)"
            for key, value in before.items():
                if now.get(key, self) is not value and _is_of_interest(owner, key, value):
                    with contextlib.suppress(AttributeError, TypeError):
                        setattr(owner, key, value)
                        yield f"{name}.{key}"
            for key in [key for key in now if key not in before]:
                if _is_of_a_script(now[key]) or not (
                    key.startswith("_" if isinstance(owner, type) else "__")
                    or (isinstance(owner, types.ModuleType) and not isinstance(now[key], _CODE))
                ):
                    with contextlib.suppress(AttributeError, TypeError):
                        delattr(owner, key)
                        yield f"{name}.{key}, which is new"

    def _thread_changes(self) -> Iterator[str]:
        for thread in set(threading.enumerate()) - self._threads:
            # A timer has a function in the place of a target; a thread that Python did not start has neither.
            code = getattr(thread, "_target", None) or getattr(thread, "function", None)
            if code is None and type(thread).__module__ == "threading":
                continue
            if (getattr(code or type(thread), "__module__", "") or "").partition(".")[0] in (*_PACKAGES, "concurrent"):
                continue
            if isinstance(thread, threading.Timer):
                thread.cancel()
                yield f"a timer, {thread.name}, was still to come"
            thread.join(_THREAD_END_S)
            if thread.is_alive():
                yield f"a thread, {thread.name}, still runs"
                # Struck at its next instruction, without a report; one that waits in the system costs nothing.
                thread._invoke_excepthook = lambda _thread: None  # type: ignore[attr-defined]  # noqa: SLF001
                number, struck = ctypes.c_ulong(thread.ident or 0), ctypes.py_object(SystemExit)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, struck)


class _Code(msgspec.Struct, frozen=True):
    """Modules and classes, what they are called, and a copy of what each held when so many modules were imported.

    With the tables of the engine and the harness, and a copy of each.
    """

    modules: int
    owners: list[Any]
    names: list[str]
    values: list[dict[str, Any]]
    tables: list[tuple[str, Any, Any]]

    def changed(self) -> list[int]:
        """Which of them hold something else now. In most every value is the same object, which is seen at once."""
        same = list(map(operator.eq, map(vars, self.owners), self.values))
        return [] if all(same) else [number for number, is_same in enumerate(same) if not is_same]

    def changed_tables(self) -> Iterator[tuple[str, Any, Any]]:
        """Those that hold other things now, or the same in another order."""
        for name, table, before in self.tables:
            things, others = map(_things, (table, before))
            if len(things) != len(others) or not all(map(operator.is_, things, others)):
                yield name, table, before


def _things(table: Any) -> list[Any]:
    return [*table, *table.values()] if isinstance(table, dict) else list(table)


def _find_tables(owners: list[Any], names: list[str]) -> Iterator[tuple[str, Any, Any]]:
    for owner, name in zip(owners, names, strict=True):
        if name.partition(".")[0] in _PACKAGES:
            for key, value in vars(owner).items():
                if key.isupper() and type(value) in (dict, list):
                    yield f"{name}.{key}", value, value.copy()


# What was noted last, for the next script: little changes from one to the next.
_last_code: list[_Code] = []


def _note_code() -> _Code:
    """What they hold now. What is as it was when it was last noted is not copied again."""
    if _last_code and _last_code[0].modules == len(sys.modules):
        (last,) = _last_code
        values = list(last.values)
        for number in last.changed():
            values[number] = vars(last.owners[number]).copy()
        noted = _Code(last.modules, last.owners, last.names, values, last.tables)
    else:
        found = {id(owner): (owner, name) for owner, name in _find_owners()}.values()
        owners = [owner for owner, _name in found]
        names = [name for _owner, name in found]
        values = [vars(owner).copy() for owner in owners]
        noted = _Code(len(sys.modules), owners, names, values, list(_find_tables(owners, names)))
    _last_code[:] = [noted]
    return noted


def _children() -> set[int]:
    """The processes that this one has started, those too that have ended and were not waited for."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            found.update(map(int, task.read_text().split()))
    return found


def _is_of_a_script(value: object) -> bool:
    return isinstance(value, types.FunctionType) and not _is_of_a_library(value.__code__.co_filename)


def _is_of_a_library(file: str | None) -> bool:
    return file is None or any(Path(file).is_relative_to(folder) for folder in _LIBRARIES)


def _find_owners() -> Iterator[tuple[Any, str]]:
    """The modules of engine, harness and pytest, with their classes and enum members, and modules of libraries."""
    others = {module.__name__: module for module in (*_OTHERS, sys.modules.get("pytest")) if module is not None}
    for name, module in list((sys.modules | others).items()):
        package = name.partition(".")[0]
        if module is not None and (name in others or package in (*_PACKAGES, *_RUNNERS)):
            yield module, name
            for value in list(vars(module).values()):
                if isinstance(value, type) and value.__module__.startswith(name):
                    yield value, f"{name}.{value.__qualname__}"
                    if issubclass(value, Enum) and package in _PACKAGES:
                        yield from ((member, f"{name}.{member}") for member in value)
        elif isinstance(module, types.ModuleType) and (package in sys.stdlib_module_names or name in _ALSO):
            yield module, name


def _is_of_interest(owner: object, key: str, value: object) -> bool:
    """Code everywhere, and the constants of the engine and of Python; counters and caches of the harness change."""
    if isinstance(value, _CODE) or isinstance(owner, Enum):
        return True
    package = owner.__name__.partition(".")[0] if isinstance(owner, types.ModuleType) else ""
    if callable(value) and not key.startswith("__") and package not in _PACKAGES:
        return True  # such as the partial function that pytest puts in the place of threading.excepthook
    return key.isupper() and (package == "engine" or (key[0] != "_" and package in sys.stdlib_module_names))


def _difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = [key for key in {**before, **now} if before.get(key, _difference) != now.get(key, _difference)]
        return ", ".join(map(str, keys))
    return str(now) if isinstance(now, (str, int, float)) else ""
