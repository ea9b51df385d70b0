"""Keeps the refusal of one script from the others of its file: the name is bound to the refusal, and the file goes on.

Owns the change of a file's syntax tree, and the hook that the changed file calls. Imports nothing of the file.
"""

from __future__ import annotations

import ast
import sys
from typing import Final

import msgspec

# The name of the hook in a module; no source can spell it.
REFUSED: Final = "@scripted_refused"


class RefusedScript(msgspec.Struct, frozen=True):
    """Takes the place of a decorated function that its decorators refused with ``error``."""

    error: Exception


def refused() -> RefusedScript:
    """Return the exception that is being handled, in place of the function."""
    error = sys.exception()
    assert isinstance(error, Exception), "called where one is handled"
    return RefusedScript(error)


class GuardedScripts(ast.NodeTransformer):
    """Puts each decorated function of a file and its classes into a ``try``; inside of functions nothing changes."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Module | ast.ClassDef | ast.If):
            return super().generic_visit(node)
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.stmt:
        return _guarded(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.stmt:
        return _guarded(node)


def _guarded(node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.stmt:
    if not node.decorator_list:
        return node
    bound = ast.Assign([ast.Name(node.name, ast.Store())], ast.Call(ast.Name(REFUSED, ast.Load()), [], []))
    handler = ast.ExceptHandler(ast.Name("Exception", ast.Load()), None, [bound])
    guarded = ast.Try([node], [handler], [], [])
    for made in (bound, handler, guarded):
        ast.copy_location(made, node)
    return ast.fix_missing_locations(guarded)
