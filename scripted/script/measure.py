"""Measures a script: the assertions that ran, in it and in its helpers, and the generators that never ran.

The functions in a script's file and its helpers' files get code compiled from the same source with counters beside each
assertion. Lines, names and messages do not change. The engine and libraries are left alone.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import functools
import gc
import inspect
import sys
import sysconfig
import types
from collections.abc import Callable, Iterable, Iterator, KeysView, Sequence
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, Final, TypeGuard

import msgspec

from scripted.core.edits import codes_in
from scripted.core.errors import BadCall
from scripted.core.installed import is_in_harness
from scripted.core.phrases import path_of
from scripted.script.counted_source import HOOKS, Site, counted
from scripted.script.scripted_test import ScriptedTest
from scripted.script.values import Among

_ENGINE: Final = Path(__file__).parents[2] / "engine"
_LIBRARIES: Final = tuple({Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib", "purelib")})
_INSTALLED: Final = frozenset({"site-packages", "dist-packages"})
# Names in a counted module: whether its assertions can be negated, and the modules its functions import.
_NEGATABLE: Final = "@scripted_negatable"
_IMPORTED: Final = "@scripted_imports"
# Objects that may hold functions, besides modules, their classes and other functions.
_HOLDERS: Final = (
    dict, list, tuple, set, frozenset, property, staticmethod, classmethod, functools.partial, types.MethodType,
    types.CellType, ScriptedTest,
)  # fmt: skip
_Made: Final = (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)
_STATES: Final[dict[type, tuple[Callable[[Any], str], str]]] = {
    types.GeneratorType: (inspect.getgeneratorstate, inspect.GEN_CREATED),
    types.CoroutineType: (inspect.getcoroutinestate, inspect.CORO_CREATED),
}


class _Origin(msgspec.Struct, frozen=True):
    """A generator of a helper, and the line that made it."""

    generator: Any
    where: str

    @property
    def has_begun(self) -> bool:
        if isinstance(self.generator, types.AsyncGeneratorType):
            return bool(self.generator.ag_running or self.generator.ag_frame is None or self.generator.ag_await)
        state, created = _STATES[type(self.generator)]
        return state(self.generator) != created


class Measured:
    """The assertions of one run of a script: ``executed`` counts them by site, ``failing`` failed last."""

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = inspect.unwrap(function)
        self.is_counted = count_assertions(function)
        self.executed: dict[Site, int] = {}
        self.failing: set[Site] = set()
        # Whether each ``all(...)`` assertion had any element.
        self._had_elements: dict[Site, bool] = {}
        self._made: list[_Origin] = []
        self._modules = len(sys.modules)

    def __enter__(self) -> None:
        self._outer, _now.measured = _now.measured, self

    def __exit__(self, *_exc: object) -> None:
        _now.measured = self._outer

    def made(self, value: Any) -> None:
        """Keep a helper's generator until it has begun to run."""
        code = value.gi_code if isinstance(value, types.GeneratorType) else getattr(value, "cr_code", None)
        code = code or value.ag_code
        if code.co_name.startswith("<") or not _is_of_the_project(code.co_filename):
            return
        caller = sys._getframe(2)  # noqa: SLF001 - the only way to name the calling frame
        self._made = [one for one in self._made if not one.has_begun]
        self._made.append(_Origin(value, f"{path_of(caller.f_code.co_filename)}:{caller.f_lineno}"))

    @property
    def assertions(self) -> int:
        """How often assertions ran in total."""
        return sum(self.executed.values())

    def check_made(self) -> None:
        """Raise BadCall for a helper's generator or coroutine that never ran."""
        for one in self._made:
            if not one.has_begun:
                name = one.generator.__name__
                remedy = f"write 'yield from {name}(...)'"
                if not isinstance(one.generator, types.GeneratorType):
                    remedy = "write it without async, as a generator, and 'yield from' it"
                raise BadCall(f"{one.where}: {name}(...) was made there and never ran, so it tested nothing; {remedy}")

    def check_asked(self) -> None:
        """Raise BadCall for a script that ended without an assertion."""
        if self.is_counted and not self.executed and not self._has_imported():
            raise BadCall(asserting_nothing(self._function.__name__))

    def loose_ends(self) -> dict[str, int]:
        """Count, by name, leftovers that may be mistakes; only counts above zero."""
        counts = {
            "assertions that failed and were caught": len(self.failing),
            "assertions on all elements of nothing": sum(not had for had in self._had_elements.values()),
        }
        return {name: count for name, count in counts.items() if count}

    def asked_of_all(self, site: Site, elements: Iterable[object]) -> Iterator[object]:
        """Forward the elements that an assertion checks, and note whether there are any."""
        self._had_elements.setdefault(site, False)
        for element in elements:
            self._had_elements[site] = True
            yield element

    def own_sites(self) -> dict[str, int]:
        """Count how often each assertion of the script itself ran, by ``file:line: text``; omit ``assert False``.

        Includes the assertions of a helper that the script names and in which none ran.
        """
        found = list(self._sites_of(self._function.__code__))
        for helper in _helpers_named_by(self._function):
            sites = [site for code in helper for site in self._sites_of(code)]
            if not any(site in self.executed for site in sites):
                found += sites
        return {f"{path_of(one.file)}:{one.line}: assert {one.text}": self.executed.get(one, 0) for one in found}

    def _sites_of(self, code: types.CodeType) -> Iterator[Site]:
        for site in _sites.get(code.co_filename, ()):
            if site.is_assertion and not site.always_fails and site.owner_line == code.co_firstlineno:
                yield site

    def _has_imported(self) -> bool:
        """Return whether the run imported a helper module, whose assertions are not counted."""
        new = list(sys.modules.values())[self._modules :]
        return any(_is_of_the_project(getattr(module, "__file__", None) or "") for module in new)


def raises_itself(error: BaseException) -> bool:
    """Return whether a statement of a counted file raised this error, rather than what it calls."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code.co_filename in _sites


def asserting_nothing(name: str) -> str:
    """Return the error for a script without an assertion."""
    return (
        f"{name} came to its end without one assertion, so it tested nothing; assert something about clients or the "
        "engine, or declare must_reach=[...] with t.sometimes, or t.smoke() if it is enough that the script ends"
    )


class _Now:
    """The current measurement, one per process.

    ``negated`` is the site whose assertion is negated; ``read`` reads attributes for the script.
    """

    measured: Measured | None = None
    negated: Site | None = None
    read: Callable[[object, str], object] = getattr


_now: Final = _Now()
# The sites of each counted file.
_sites: Final[dict[str, Sequence[Site]]] = {}


class _Hooks:
    """The hooks that one file's counted code calls, which refers to the file's sites by index."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self._sites = sites

    def reached(self, number: int) -> None:
        if _now.measured is not None:
            site = self._sites[number]
            _now.measured.executed[site] = _now.measured.executed.get(site, 0) + 1
            if site.is_assertion:
                _now.measured.failing.add(site)

    def asserting(self, number: int, function: object) -> object:
        """Count the call of a function whose name says that it asserts, unless its own assertions are counted."""
        if HOOKS not in getattr(function, "__globals__", ()):
            self.reached(number)
        return function

    def held(self, number: int) -> None:
        if _now.measured is not None:
            _now.measured.failing.discard(self._sites[number])

    def elements(self, number: int, elements: Iterable[object]) -> Iterable[object]:
        return elements if _now.measured is None else _now.measured.asked_of_all(self._sites[number], elements)

    def is_negated(self, number: int) -> bool:
        """Return whether this assertion is the negated one."""
        return _now.negated is not None and self._sites[number] == _now.negated

    def read(self, owner: object, attribute: str) -> object:
        return _now.read(owner, attribute)

    def looked_in(self, container: object) -> object:
        """Let a set or the keys of a dict refuse a word that they can never hold, as a list does."""
        return Among(container) if isinstance(container, set | frozenset | dict | KeysView) else container

    def made(self, value: Any) -> object:
        if _now.measured is not None:
            if isinstance(value, _Made):
                _now.measured.made(value)
            elif type(value) in (list, tuple):
                for one in value:
                    if isinstance(one, _Made):
                        _now.measured.made(one)
        return value


@contextlib.contextmanager
def negate(site: Site) -> Iterator[None]:
    """Negate this assertion while the context is open."""
    _now.negated = site
    try:
        yield
    finally:
        _now.negated = None


@contextlib.contextmanager
def reading_by(read: Callable[[object, str], object]) -> Iterator[None]:
    """Let this function read attributes for the script while the context is open."""
    _now.read = read
    try:
        yield
    finally:
        _now.read = getattr


def count_assertions(function: Callable[..., object], *, negatable: bool = False) -> bool:
    """Count assertions in a script's file and its helpers' files; False if the script's source cannot be found."""
    function = inspect.unwrap(function)
    function = getattr(function, "__func__", function)
    seen: set[int] = set()
    left = [function.__globals__]
    while left:
        names = left.pop()
        if id(names) in seen:
            continue
        seen.add(id(names))
        file = names.get("__file__")
        if not isinstance(file, str) or not _is_of_the_project(file):
            continue
        if HOOKS not in names or (negatable and not names[_NEGATABLE]):
            _count_in(names, file, negatable=negatable)
        left += _imported(names)
    return HOOKS in function.__globals__


def _helpers_named_by(function: Callable[..., object]) -> Iterator[list[types.CodeType]]:
    """Yield the code of each function, and of each class's methods, that a script refers to by name."""
    code, names = function.__code__, function.__globals__
    owner = type(function.__self__) if isinstance(function, types.MethodType) else None
    attributes = _names_in(code, "ATTR", "METHOD")
    for name in sorted(_names_in(code, "GLOBAL", "NAME")):
        value = names.get(name)
        if isinstance(value, types.ModuleType):
            yield from ([one.__code__] for name in attributes if _is_helper(one := vars(value).get(name), code))
        elif isinstance(value, type):
            yield [one.__code__ for one in vars(value).values() if _is_helper(one, code)]
        elif _is_helper(value, code):
            yield [value.__code__]
    yield from ([one.__code__] for name in attributes if _is_helper(one := getattr(owner, name, None), code))


def _is_helper(value: object, caller: types.CodeType) -> TypeGuard[types.FunctionType]:
    return (
        isinstance(value, types.FunctionType)
        and value.__code__ is not caller
        and "scripted" not in vars(value)
        and _is_of_the_project(value.__code__.co_filename)
    )


@functools.cache
def _names_in(code: types.CodeType, *loaded: str) -> frozenset[str]:
    """Return the names that code and its nested code load with instructions of these suffixes."""
    names: set[str] = set()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_") and instruction.opname.endswith(loaded):
            names.add(str(instruction.argval))
        elif isinstance(instruction.argval, types.CodeType):
            names |= _names_in(instruction.argval, *loaded)
    return frozenset(names)


def _count_in(names: dict[str, Any], file: str, *, negatable: bool) -> None:
    """Replace the code of every function in a module with its instrumented code."""
    try:
        source = counted(Path(file).read_bytes(), file, negatable=negatable)
    except (OSError, SyntaxError):
        return
    made = _functions_in(source.code)
    _sites[file] = source.sites
    names[HOOKS], names[_NEGATABLE] = _Hooks(source.sites), negatable
    package = names.get("__package__") or ""
    names[_IMPORTED] = [resolve_name(name, package) for name in source.imported if package or name[0] != "."]
    _add_rewriting(names)
    for function in _functions_of(names):
        new = made.get(_key(function.__code__))
        if new is not None and _is_same_shape(function.__code__, new):
            function.__code__ = new


def _functions_of(names: dict[str, object]) -> Iterator[types.FunctionType]:
    """Find the live functions of a module, through its names and through the garbage collector.

    The collector alone is not enough: it does not see objects that ``gc.freeze`` has set aside.
    """
    seen = {id(names), id(vars(builtins))}
    left: list[object] = [*names.values(), *gc.get_referrers(names)]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            if value.__globals__ is names:
                yield value
            seen.add(id(value.__globals__))  # follow a decorator's closure, but not its module
        elif not isinstance(value, type):
            if not isinstance(value, _HOLDERS):
                continue
        elif value.__module__ != names.get("__name__"):
            continue
        left += gc.get_referents(value)


def _functions_in(code: types.CodeType) -> dict[tuple[str, int], types.CodeType | None]:
    """Return the code of each function in a file, by name and line; None for two lambdas on one line."""
    found: dict[tuple[str, int], types.CodeType | None] = {}
    for one in codes_in(code):
        found[_key(one)] = None if _key(one) in found else one
    return found


def _key(code: types.CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def _is_same_shape(old: types.CodeType, new: types.CodeType) -> bool:
    """Return whether two functions have equal signatures; the file may have been edited since its import."""
    names = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_freevars", "co_flags")
    return all(getattr(old, name) == getattr(new, name) for name in names)


def _add_rewriting(names: dict[str, Any]) -> None:
    """Add the names that rewritten assertions use to modules that pytest itself has not rewritten."""
    try:
        import _pytest.assertion.rewrite as rewrite
    except ImportError:
        return
    names.setdefault("@py_builtins", builtins)
    names.setdefault("@pytest_ar", rewrite)


def _imported(names: dict[str, Any]) -> Iterator[dict[str, object]]:
    """Yield the modules that a module's names come from, and the modules that its functions import when they run."""
    for value in list(names.values()):
        if isinstance(value, types.ModuleType):
            yield vars(value)
        elif isinstance(value, (types.FunctionType, type)):
            module = sys.modules.get(getattr(value, "__module__", None) or "")
            if module is not None:
                yield vars(module)
    for name in names.get(_IMPORTED, ()):
        if name in sys.modules:
            yield vars(sys.modules[name])


@functools.lru_cache(maxsize=4096)
def _is_of_the_project(file: str) -> bool:
    """Return whether a file belongs to the user's project rather than to a library, the engine or the harness."""
    path = Path(file).resolve()
    if path.suffix != ".py" or _INSTALLED & set(path.parts):
        return False
    return not is_in_harness(str(path)) and not any(path.is_relative_to(folder) for folder in (_ENGINE, *_LIBRARIES))
