"""Edits of a scheduler's functions in the running process: a mutant's bug is put in, a known defect's fix too.

An edit is switched on in the process that runs the scheduler and undone afterwards; the files stay as they are. Edits
that are on at the same time may be in one function.
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
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import msgspec

from scripted.core.cuts import Cut, nearest_lines, places_of
from scripted.core.refusals import ScriptDefinitionError


class EditDoesNotFit(ScriptDefinitionError):
    """The installed scheduler lacks the code that a mutant or a fix edits, so it cannot be switched on."""


class _Source(NamedTuple):
    """The source of a function, from column 0, and the line of the function's file at which each of its lines stands.

    The lines of the file are counted from 1 at the function's first line.
    """

    text: str
    lines: tuple[int, ...]


# Edited functions by the code before the edit: many runs in one process switch on the same edits.
_edited: Final[dict[tuple[CodeType, str, str], CodeType]] = {}
# The source of edited code; code that is not in here has the source of its file.
_sources: Final[dict[CodeType, _Source]] = {}


class Edit(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """In the function ``target``, written as ``module:Class.function``, the text ``cut`` becomes ``becomes``.

    The cut must occur exactly once in the function's body; if it does not occur verbatim, its lines are matched at any
    indentation.
    """

    target: str
    cut: str
    becomes: str

    @contextlib.contextmanager
    def switched_on(self, of: str) -> Iterator[None]:
        """Edit the function while the context is open. ``of`` begins the error, such as ``the mutant lost-abort``.

        Raises EditDoesNotFit without changing anything.
        """
        function = self.function(of)
        # The function keeps its identity, defaults and decorators: every module that imported it is edited.
        before, key = function.__code__, (function.__code__, self.cut, self.becomes)
        if key not in _edited:
            _edited[key] = self._edited_code(function, of)
        function.__code__ = _edited[key]
        try:
            yield
        finally:
            function.__code__ = before

    def function(self, of: str) -> FunctionType:
        """Return the function that is edited. Raises EditDoesNotFit."""
        return function_in(found_at(self.target, of)[2], self.target, of)

    def _edited_code(self, function: FunctionType, of: str) -> CodeType:
        before = function.__code__
        source = _sources.get(before) or _source_of(function, self.target, of)
        place = self._place_in(source, of)
        definition, becomes = self._put_in(source.text, place, of)
        text = source.text[: place.start] + becomes + source.text[place.end :]
        edited = _Source(text, _lines_after(source, place, becomes))
        _restore_lines(definition, edited.lines)
        ast.increment_lineno(definition, before.co_firstlineno - 1)
        code = _compiled(definition, before)
        if code.co_freevars != before.co_freevars:
            raise _misfit(
                of,
                f"{self.target} must use the same names of the scopes around it with {self.becomes!r}: it used "
                f"{before.co_freevars}, and now {code.co_freevars}",
            )
        for name in _globals_in(code) - _globals_in(before):
            if name not in function.__globals__ and not hasattr(builtins, name):
                raise _misfit(of, f"{function.__module__} has no name {name!r}, which {self.becomes!r} uses")
        code = code.replace(co_qualname=before.co_qualname)
        _sources[code] = edited
        return code

    def _put_in(self, source: str, place: Cut, of: str) -> tuple[ast.FunctionDef | ast.AsyncFunctionDef, str]:
        """Return the edited function, and the text that was put in. Raises EditDoesNotFit."""
        wrong: Exception | None = None
        for becomes in place.becomes:
            try:
                return _definition_in(source[: place.start] + becomes + source[place.end :]), becomes
            except (SyntaxError, TypeError, ValueError) as exc:  # also lines that leave the function
                wrong = wrong or exc
        raise _misfit(of, f"{self.target} cannot be compiled with {self.becomes!r}: {wrong}") from wrong

    def _place_in(self, source: _Source, of: str) -> Cut:
        """Return the one place of the cut in the function's body. Raises EditDoesNotFit."""
        text = source.text
        places = places_of(text, self.cut, self.becomes)
        line = 1 + text[: places[0].start if places else 0].count("\n")
        if len(places) == 1 and line >= _definition_in(text).body[0].lineno:
            return places[0]
        before = f", in line {line}, before its body" if len(places) == 1 else ""
        raise _misfit(
            of,
            f"the body of {self.target} must have {self.cut!r} exactly once, but the function has it {len(places)} "
            f"times{before}" + ("" if places else nearest_lines(text, self.cut)),
        )


def found_at(target: str, of: str) -> tuple[type | ModuleType, str, object]:
    """Return the owner, the name and the value of the attribute ``module:Class.attribute``. Raises EditDoesNotFit."""
    module, _, path = target.partition(":")
    *owners, attribute = path.split(".")
    try:
        owner = functools.reduce(getattr, owners, importlib.import_module(module))
        return owner, attribute, inspect.getattr_static(owner, attribute)
    except (ImportError, AttributeError) as exc:
        raise _misfit(of, f"there is no {target}: {exc}") from exc


def function_in(original: object, target: str, of: str) -> FunctionType:
    """Unwrap the function from a property, a static or class method, or a decorator. Raises EditDoesNotFit."""
    found = inspect.unwrap(inside(original))
    if not isinstance(found, FunctionType) or found.__name__ == "<lambda>":
        raise _misfit(of, f"{target} must be a function defined by `def`, got {original!r}")
    return found


def inside(original: object) -> Any:
    """Return the function of a property or of a class or static method; other attributes as they are."""
    return getattr(original, "fget", None) or getattr(original, "func", None) or original


def _misfit(of: str, why: str) -> EditDoesNotFit:
    return EditDoesNotFit(f"{of} does not fit: {why}")


def _source_of(function: FunctionType, target: str, of: str) -> _Source:
    """Read the function's source from its file. Raises EditDoesNotFit."""
    try:
        text = textwrap.dedent(inspect.getsource(function))
        definition = _definition_in(text)
    except (OSError, SyntaxError, TypeError, ValueError) as exc:
        raise _misfit(of, f"the source of {target} cannot be read: {exc}") from exc
    if definition.name != function.__code__.co_name:
        raise _misfit(of, f"the file of {target} has changed since it was imported")
    return _Source(text, tuple(range(1, text.count("\n") + 2)))


def _definition_in(source: str) -> ast.FunctionDef | ast.AsyncFunctionDef:
    (definition,) = ast.parse(source).body
    if not isinstance(definition, ast.FunctionDef | ast.AsyncFunctionDef):
        raise TypeError(f"line 1 is not a function, but {ast.unparse(definition)[:40]}")
    return definition


def _lines_after(source: _Source, place: Cut, becomes: str) -> tuple[int, ...]:
    """Return the lines of the file after an edit: lines that are put in stand where the cut text stood."""
    first = source.text.count("\n", 0, place.start)
    last = source.text.count("\n", 0, place.end)
    put_in = [source.lines[min(first + line, last)] for line in range(becomes.count("\n") + 1)]
    return (*source.lines[:first], *put_in, *source.lines[last + 1 :])


def _restore_lines(definition: ast.AST, lines: tuple[int, ...]) -> None:
    """Give every node its line in the function's file."""
    for node in ast.walk(definition):
        if isinstance(node, ast.stmt | ast.expr | ast.excepthandler | ast.arg | ast.keyword | ast.alias):
            for name in ("lineno", "end_lineno"):
                setattr(node, name, lines[getattr(node, name) - 1])
            if node.lineno == node.end_lineno and node.col_offset > (node.end_col_offset or 0):
                node.end_col_offset = node.col_offset


def _compiled(definition: ast.FunctionDef | ast.AsyncFunctionDef, before: CodeType) -> CodeType:
    """Compile a function within the scopes of the code before: its closure, and its class for ``super()``."""
    owner = before.co_qualname.rpartition(".")[0].rpartition(".")[2]
    closure = ", ".join(name for name in before.co_freevars if name != "__class__")
    body: list[ast.stmt] = [definition]
    if owner.isidentifier():
        # Mangling of private names drops leading underscores of the class; no function refers to this name.
        body = [_scope(f"class ____{owner}: pass", body)]
    if closure:
        body = [_scope(f"def scope({closure}): pass", body)]
    flags = before.co_flags & __future__.annotations.compiler_flag
    code = compile(ast.Module(body, []), before.co_filename, "exec", flags, dont_inherit=True)
    wanted = (before.co_name, before.co_firstlineno)
    return next(one for one in codes_in(code) if (one.co_name, one.co_firstlineno) == wanted)


def _scope(text: str, body: list[ast.stmt]) -> ast.stmt:
    (scope,) = ast.parse(text).body
    assert isinstance(scope, ast.ClassDef | ast.FunctionDef)
    scope.body = body
    return scope


def _globals_in(code: CodeType) -> set[str]:
    steps = (step for one in codes_in(code) for step in dis.get_instructions(one))
    return {step.argval for step in steps if step.opname == "LOAD_GLOBAL"}


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object and the code of all functions and classes nested in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)
