"""Switching a mutant on in this process, which must be a child that does nothing else: there is no way back.

Only the code of one function is exchanged, so that whatever was imported and collected before stays as it is.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

from tools.mutation.operators import MODULE, Mutant, mutated

__all__ = ["switch_on"]


def switch_on(mutant: Mutant) -> bool:
    """Put the mutant into the running code; False when it compiles to what is there already, or has no place there.

    A function that a decorator has made into something else cannot be exchanged any more.
    """
    module = importlib.import_module(mutant.file.removesuffix(".py").replace("/", "."))
    source = Path(mutant.file).read_text(encoding="utf-8")
    tree = mutated(source, mutant)
    code = compile(tree, module.__file__ or mutant.file, "exec")
    if code == compile(source, module.__file__ or mutant.file, "exec"):
        return False
    if mutant.function == MODULE:
        _change_number(module, tree, mutant)
        return True
    return _change_function(module, tree, code, mutant)


def _change_number(module: ModuleType, tree: ast.Module, mutant: Mutant) -> None:
    """A number of the module, and in every module that has imported it."""
    statement = next(node for node in tree.body if node.lineno == mutant.first_line)
    assert isinstance(statement, ast.Assign | ast.AnnAssign), f"{mutant.id} changes no number"
    assert isinstance(statement.value, ast.Constant), f"{mutant.id} changes no number"
    target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
    name = ast.unparse(target)
    for other in list(sys.modules.values()):
        held = vars(other).get(name) if other is not None else None
        if other is module or (held is not None and held == getattr(module, name) and _is_ours(other)):
            setattr(other, name, statement.value.value)


def _is_ours(module: ModuleType) -> bool:
    return module.__name__.partition(".")[0] in {"engine", "scripted"} or module.__name__.startswith("test_")


def _change_function(module: ModuleType, tree: ast.Module, code: CodeType, mutant: Mutant) -> bool:
    function = _function(module, mutant.function)
    if function is None:
        return False
    function.__code__ = next(
        one
        for one in _codes(code)
        if one.co_qualname == mutant.function and one.co_firstlineno == function.__code__.co_firstlineno
    )
    definition = next(
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name == function.__name__
        and node.lineno == _line_of(node, function)
    )
    arguments = definition.args
    if function.__defaults__:
        function.__defaults__ = tuple(map(_new, arguments.defaults, function.__defaults__))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if default is not None and function.__kwdefaults__ is not None:
            function.__kwdefaults__[argument.arg] = _new(default, function.__kwdefaults__[argument.arg])
    return True


def _line_of(node: ast.FunctionDef | ast.AsyncFunctionDef, function: FunctionType) -> int:
    """The line of ``def``; a function with decorators counts from the first of those."""
    first = node.decorator_list[0].lineno if node.decorator_list else node.lineno
    return node.lineno if first == function.__code__.co_firstlineno else -1


def _new(default: ast.expr, old: object) -> object:
    return default.value if isinstance(default, ast.Constant) else old


def _function(module: ModuleType, qualname: str) -> FunctionType | None:
    found: Any = module
    for name in qualname.split("."):
        found = vars(found).get(name)
        if found is None:
            return None
    for wrapper in ("fget", "__func__", "__wrapped__"):
        found = getattr(found, wrapper, found)
    return found if isinstance(found, FunctionType) and found.__qualname__ == qualname else None


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)
