"""A function with statements left out: for bugs that sit in the middle of a long function of another project.

The function is compiled again from the source that is installed; none of that source is kept here.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable
from types import FunctionType
from typing import Any, cast

__all__ = ["NoSuchStatement", "without"]


class NoSuchStatement(LookupError):
    """The installed version of a function has no such statement: this bug cannot be put into it."""


def without(function: Callable[..., Any], *beginnings: str) -> Callable[..., Any]:
    """The same function without its statements that begin so, as ``ast.unparse`` writes them.

    Raises NoSuchStatement for a beginning that no statement has.
    """
    original = cast(FunctionType, function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    ast.increment_lineno(tree, original.__code__.co_firstlineno - 1)
    cutter = _Cutter(beginnings)
    cutter.visit(tree)
    if cutter.missing:
        raise NoSuchStatement(
            f"{original.__qualname__} has no statement {', '.join(map(repr, sorted(cutter.missing)))}"
        )
    names: dict[str, Any] = {}
    code = compile(ast.fix_missing_locations(tree), original.__code__.co_filename, "exec")
    exec(code, original.__globals__, names)  # noqa: S102 - the installed function itself, with less in it
    return cast(Callable[..., Any], names[original.__name__])


class _Cutter(ast.NodeTransformer):
    def __init__(self, beginnings: tuple[str, ...]) -> None:
        self._beginnings = beginnings
        self.missing = set(beginnings)

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Expr | ast.Assign | ast.AugAssign):
            text = ast.unparse(node)
            for beginning in self._beginnings:
                if text.startswith(beginning):
                    self.missing.discard(beginning)
                    return ast.copy_location(ast.Pass(), node)
        return super().generic_visit(node)
