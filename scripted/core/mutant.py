"""Mutants: edits that put a real engine's bug back into its code for a run, and files of mutants.

The harness applies a mutant in the process that runs the scheduler and undoes it afterwards; the engine's own code
contains no switch and no bug.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import dis
import functools
import importlib
import inspect
import textwrap
import tomllib
from collections.abc import Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from scripted.core.cuts import Cut, nearest_lines, places_of
from scripted.core.protocol import Adapter
from scripted.core.refusals import ScriptDefinitionError

# Compiled mutants: many runs in one process switch on the same ones.
_broken: dict[tuple[CodeType, str, str], CodeType] = {}


class MutantDoesNotFit(ScriptDefinitionError):
    """The installed scheduler lacks the code that the mutant edits, so the mutant cannot be switched on."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One bug in ``target``, written as ``module:Class.attribute``; the failures that it causes contain ``signature``.

    The text ``cut``, which must occur exactly once in the body of the target's function, becomes ``becomes``; if it
    does not occur verbatim, its lines are matched at any indentation. A bug that needs new logic has a ``replacement``
    for the whole attribute instead. ``kind`` and ``note`` compare it with the bug of its ``origin``: an imitation fails
    in the same way through other code. ``schedule`` shows the bug if its test is not a script. ``adapter`` names the
    adapter whose targets a search for it uses; empty for the searched adapter.
    """

    name: str
    origin: str
    bug: str
    signature: str
    test: str
    target: str
    cut: str = ""
    becomes: str = ""
    replacement: object = None
    kind: Literal["put back", "put back in part", "imitated"] = "put back"
    note: str = ""
    schedule: str = ""
    adapter: str = ""

    def __post_init__(self) -> None:
        if bool(self.cut) == (self.replacement is not None):
            raise ScriptDefinitionError(f"the mutant {self.name} must have either a cut or a replacement")
        if (self.kind == "put back") != (not self.note):
            raise ScriptDefinitionError(
                f"the mutant {self.name} must have a note if and only if it is not the bug itself, "
                f"got kind={self.kind!r} and note={self.note!r}"
            )

    @property
    def nearness(self) -> str:
        """How it differs from the bug of its origin; empty if it is that bug."""
        return "" if self.kind == "put back" else f"{self.kind}: {self.note}"

    @contextlib.contextmanager
    def switched_on(self) -> Iterator[None]:
        """Put the bug in while the context is open. Raises MutantDoesNotFit without changing anything."""
        owner, attribute, original = self._find()
        if self.cut:
            function = self._function(original)
            # The function keeps its identity, defaults and decorators: every module that imported it gets the bug.
            healthy, key = function.__code__, (function.__code__, self.cut, self.becomes)
            if key not in _broken:
                _broken[key] = self._broken_code(function)
            function.__code__ = _broken[key]
            try:
                yield
            finally:
                function.__code__ = healthy
            return
        is_own = attribute in vars(owner)
        setattr(owner, attribute, self.replacement)
        try:
            yield
        finally:
            if is_own:
                setattr(owner, attribute, original)
            else:
                delattr(owner, attribute)

    @property
    def function(self) -> FunctionType:
        """The function that the cut edits. Raises MutantDoesNotFit."""
        return self._function(self._find()[2])

    def is_met(self, codes: Container[int]) -> bool:
        """Return whether the mutated code is among these code objects, which a run called, by id.

        True for a target that is not code, such as a limit: any run may depend on it.
        """
        try:
            original = self._find()[2]
        except MutantDoesNotFit:
            return False
        inner = _inside(original)
        code = getattr(inspect.unwrap(inner), "__code__", None) if callable(inner) or self.cut else None
        code = code or getattr(getattr(original, "__func__", None), "__code__", None)
        return code is None or id(code) in codes

    def _find(self) -> tuple[type | ModuleType, str, object]:
        module, _, path = self.target.partition(":")
        *owners, attribute = path.split(".")
        try:
            owner = functools.reduce(getattr, owners, importlib.import_module(module))
            return owner, attribute, inspect.getattr_static(owner, attribute)
        except (ImportError, AttributeError) as exc:
            raise self._misfit(f"there is no {self.target}: {exc}") from exc

    def _function(self, original: object) -> FunctionType:
        """Unwrap the function from a property, a static or class method, or a decorator."""
        found = inspect.unwrap(_inside(original))
        if not isinstance(found, FunctionType) or found.__name__ == "<lambda>":
            raise self._misfit(f"{self.target} must be a function defined by `def`, got {original!r}")
        return found

    def _broken_code(self, function: FunctionType) -> CodeType:
        healthy = function.__code__
        try:
            source = textwrap.dedent(inspect.getsource(function))
            before = _definition_in(source)
        except (OSError, SyntaxError, TypeError, ValueError) as exc:
            raise self._misfit(f"the source of {self.target} cannot be read: {exc}") from exc
        if before.name != healthy.co_name:
            raise self._misfit(f"the file of {self.target} has changed since it was imported")
        place, line = self._place_in(source, before)
        removed = source[place.start : place.end]
        definition, becomes = self._edited(source, place)
        _keep_lines(definition, line + removed.count("\n"), line + becomes.count("\n"))
        ast.increment_lineno(definition, healthy.co_firstlineno - 1)
        broken = _compiled(definition, healthy)
        if broken.co_freevars != healthy.co_freevars:
            raise self._misfit(
                f"{self.target} must use the same names of the scopes around it with {self.becomes!r}: it used "
                f"{healthy.co_freevars}, and now {broken.co_freevars}"
            )
        for name in _globals_in(broken) - _globals_in(healthy):
            if name not in function.__globals__ and not hasattr(builtins, name):
                raise self._misfit(f"{function.__module__} has no name {name!r}, which {self.becomes!r} uses")
        return broken.replace(co_qualname=healthy.co_qualname)

    def _edited(self, source: str, place: Cut) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]:
        """Return the edited function, and the text that was put in. Raises MutantDoesNotFit."""
        wrong: SyntaxError | None = None
        for becomes in place.becomes:
            try:
                return _definition_in(source[: place.start] + becomes + source[place.end :]), becomes
            except SyntaxError as exc:
                wrong = wrong or exc
        raise self._misfit(f"{self.target} cannot be compiled with {self.becomes!r}: {wrong}") from wrong

    def _place_in(self, source: str, definition: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[Cut, int]:
        """Return the one place of the cut in the function's body, and its line. Raises MutantDoesNotFit."""
        places = places_of(source, self.cut, self.becomes)
        line = 1 + source[: places[0].start if places else 0].count("\n")
        if len(places) == 1 and line >= definition.body[0].lineno:
            return places[0], line
        before = f", in line {line}, before its body" if len(places) == 1 else ""
        raise self._misfit(
            f"the body of {self.target} must have {self.cut!r} exactly once, but the function has it {len(places)} "
            f"times{before}" + ("" if places else nearest_lines(source, self.cut))
        )

    def _misfit(self, why: str) -> MutantDoesNotFit:
        return MutantDoesNotFit(f"the mutant {self.name} does not fit: {why}")


@runtime_checkable
class HasMutants(Protocol):
    """An adapter that has mutants of its scheduler."""

    @property
    def mutant_names(self) -> tuple[str, ...]: ...

    def switched_on(self, mutant: str | None) -> AbstractContextManager[None]:
        """Switch a mutant on while the context is open; None for none. Raises ValueError for an unknown one."""
        ...

    def bugs_met(self, codes: Container[int]) -> Sequence[str]:
        """Return the mutants of code that a run called, given by the ids of its code objects."""
        ...


def switched_on(adapter: Adapter, mutant: str | None) -> AbstractContextManager[None]:
    """Switch a mutant of the adapter on while the context is open; None for none. Raises ValueError."""
    if isinstance(adapter, HasMutants):
        return adapter.switched_on(mutant)
    if mutant is None:
        return contextlib.nullcontext()
    raise ScriptDefinitionError(f"the adapter {adapter.name} has no mutants, got {mutant!r}; leave the mutant out")


def mutant_names_of(adapter: Adapter) -> tuple[str, ...]:
    """Return the names of an adapter's mutants; empty for an adapter without mutants."""
    return adapter.mutant_names if isinstance(adapter, HasMutants) else ()


def refusal_of_mutant(adapter: Adapter, mutant: str) -> str | None:
    """Return an error with the nearest name if the adapter has no such mutant; None if it has."""
    if mutant in mutant_names_of(adapter):
        return None
    try:
        with switched_on(adapter, mutant):
            return None
    except (ValueError, ScriptDefinitionError) as exc:
        return str(exc)


def read_mutants(file: Path) -> tuple[Mutant, ...]:
    """Read mutants from a TOML file: a table ``[[mutant]]`` for each, with the fields of ``Mutant``.

    A table ``[every]`` before them has the fields that they share.
    """
    try:
        tables = tomllib.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as exc:  # also bytes that are no UTF-8, and brackets without end
        raise ScriptDefinitionError(f"{file} is no TOML: {exc}") from exc
    if unknown := set(tables) - {"every", "mutant"}:
        raise ScriptDefinitionError(f"{file} has tables [every] and [[mutant]] alone, got {sorted(unknown)}")
    try:
        found = msgspec.convert(tables, _MutantFile)
    except msgspec.ValidationError as exc:
        raise ScriptDefinitionError(f"{file} has tables [every] and [[mutant]] alone: {exc}") from exc
    mutants = []
    for table in found.mutant:
        name, fields = table.get("name", "without a name"), found.every | table
        for field, value in fields.items():
            if field != "replacement" and not isinstance(value, str):
                raise ScriptDefinitionError(f"{file}: the mutant {name} must have a text as {field}, got {value!r}")
        try:
            mutants.append(Mutant(**fields))
        except TypeError as exc:
            raise ScriptDefinitionError(f"{file}: the mutant {name} must have the fields of Mutant: {exc}") from exc
        except ScriptDefinitionError as exc:
            raise ScriptDefinitionError(f"{file}: {exc}") from exc
    return tuple(mutants)


class _MutantFile(msgspec.Struct, frozen=True):
    every: dict[str, Any] = {}
    mutant: tuple[dict[str, Any], ...] = ()


def _inside(original: object) -> Any:
    return getattr(original, "fget", None) or getattr(original, "func", None) or original


def _definition_in(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (definition,) = ast.parse(source).body
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"line 1 is not a function, but {ast.unparse(definition)[:40]}")
    return definition


def _keep_lines(definition: ast.AST, cut_end: int, end: int) -> None:
    """Give the lines after the edit, which now ends in line ``end``, their original numbers back."""
    for node in ast.walk(definition) if end != cut_end else ():
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg | ast.keyword | ast.alias):
            for name in ("lineno", "end_lineno"):
                line = getattr(node, name)
                setattr(node, name, line - end + cut_end if line > end else min(line, cut_end))
            if node.lineno == node.end_lineno and node.col_offset > (node.end_col_offset or 0):
                node.end_col_offset = node.col_offset


def _compiled(definition: ast.FunctionDef | ast.AsyncFunctionDef, healthy: CodeType) -> CodeType:
    """Compile a function within the scopes of the healthy one: its closure, and its class for ``super()``."""
    owner = healthy.co_qualname.rpartition(".")[0].rpartition(".")[2]
    closure = ", ".join(name for name in healthy.co_freevars if name != "__class__")
    body: list[ast.stmt] = [definition]
    if owner.isidentifier():
        # Mangling of private names drops leading underscores of the class; no function refers to this name.
        body = [_scope(f"class ____{owner}: pass", body)]
    if closure:
        body = [_scope(f"def scope({closure}): pass", body)]
    flags = healthy.co_flags & __future__.annotations.compiler_flag
    code = compile(ast.Module(body, []), healthy.co_filename, "exec", flags, dont_inherit=True)
    wanted = (healthy.co_name, healthy.co_firstlineno)
    return next(one for one in _codes_in(code) if (one.co_name, one.co_firstlineno) == wanted)


def _scope(text: str, body: list[ast.stmt]) -> ast.stmt:
    (scope,) = ast.parse(text).body
    assert isinstance(scope, ast.ClassDef | ast.FunctionDef)
    scope.body = body
    return scope


def _globals_in(code: CodeType) -> set[str]:
    codes = (code, *_codes_in(code))
    return {step.argval for one in codes for step in dis.get_instructions(one) if step.opname == "LOAD_GLOBAL"}


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes_in(constant)
