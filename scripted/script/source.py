"""What can be seen wrong in a script before it runs: statements without an effect, assertions that always hold.

Reads a function's source; never runs it. A function whose source cannot be found passes.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Callable, Iterator
from typing import Any, Final

__all__ = ["code_of", "file_of", "idle_statements"]

_DROPPED: Final = (ast.Compare, ast.Attribute, ast.Name, ast.Lambda, ast.GeneratorExp, ast.UnaryOp)
_DROPPED_WITHOUT_CALLS: Final = (ast.BoolOp, ast.BinOp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript)
# Attributes whose values are words.
_WORDS: Final = frozenset({"finish_reason", "mode", "paused", "status"})
_ACTS: Final = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def file_of(function: Callable[..., Any]) -> str:
    """The file that a function was written in, also where a decorator of another file stands around it."""
    return code_of(function).co_filename


def code_of(function: Callable[..., Any]) -> types.CodeType:
    """The function's own code, below decorators that say what they wrap."""
    code: types.CodeType = inspect.unwrap(function).__code__
    return code


def idle_statements(function: Callable[..., Any]) -> Iterator[str]:
    """``line N: what it is, and what to write``, for each statement of a script that tests and does nothing."""
    try:
        lines, first = inspect.getsourcelines(function)
        tree = ast.parse(textwrap.dedent("".join(lines)))
    except (OSError, TypeError, SyntaxError):
        return
    for statement in _statements(tree.body):
        why = _why_idle(statement, function)
        if why is not None:
            yield f"line {first + statement.lineno - 1}: {why}"


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Every statement but those inside pytest.raises, where reading a value is a test."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.Try) or (isinstance(statement, ast.With) and _expects_errors(statement)):
            continue
        for name in ("body", "orelse", "finalbody"):
            yield from _statements(getattr(statement, name, []))
        for case in getattr(statement, "cases", []):
            yield from _statements(case.body)


def _expects_errors(statement: ast.With) -> bool:
    return any("raises" in ast.unparse(item) or "suppress" in ast.unparse(item) for item in statement.items)


def _why_idle(statement: ast.stmt, function: Callable[..., Any]) -> str | None:
    if isinstance(statement, ast.Assert):
        return _why_always_true(statement.test)
    if not isinstance(statement, ast.Expr):
        return None
    value, text = statement.value, ast.unparse(statement.value)
    if isinstance(value, ast.Compare) or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)):
        return f"'{text}' is worked out and dropped; write 'assert {text}'"
    idle = isinstance(value, _DROPPED) or (isinstance(value, _DROPPED_WITHOUT_CALLS) and not _acts(value))
    if idle or (isinstance(value, ast.Constant) and not isinstance(value.value, (str, type(...)))):
        return f"'{text}' does nothing; call it, or assert something of it"
    return _why_no_predicate(value) or _why_never_run(value, function)


def _why_no_predicate(value: ast.expr) -> str | None:
    """A wait for what is always so, or never."""
    if not isinstance(value, ast.YieldFrom) or not isinstance(value.value, ast.Call):
        return None
    waited = value.value.args[0] if value.value.args else None
    if isinstance(waited, ast.Lambda) and isinstance(waited.body, ast.Constant):
        return f"'{ast.unparse(value)}' waits for a constant; let the predicate ask something of the engine"
    return None


def _why_always_true(test: ast.expr) -> str | None:
    text = ast.unparse(test)
    if isinstance(test, ast.Tuple) and test.elts:
        return f"'assert {text}' always holds, because a tuple is true; leave the parentheses out"
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) and any(map(_is_true, test.values)):
        return f"'assert {text}' always holds, because a part of it is always true; compare each part"
    if isinstance(test, ast.Compare) and len(test.ops) == 1:
        return _why_no_comparison(test, text)
    if isinstance(test, (ast.Lambda, ast.GeneratorExp, ast.JoinedStr)) or _is_true(test):
        return f"'assert {text}' always holds"
    return None


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and bool(value.value)


def _why_no_comparison(test: ast.Compare, text: str) -> str | None:
    """Identity of what is only equal; a part of a text where one of several words is meant."""
    operator, right = test.ops[0], test.comparators[0]
    if not isinstance(right, ast.Constant) or not isinstance(right.value, (str, int)) or isinstance(right.value, bool):
        return None
    if isinstance(operator, (ast.Is, ast.IsNot)):
        return f"'assert {text}' asks whether it is the very same object; write == or !="
    is_word = isinstance(test.left, ast.Attribute) and test.left.attr in _WORDS
    if is_word and isinstance(operator, (ast.In, ast.NotIn)):
        return f"'assert {text}' looks for a part of a text; write a tuple of words"
    return None


def _why_never_run(value: ast.expr, function: Callable[..., Any]) -> str | None:
    """A generator that is made and dropped: its body never runs."""
    if not isinstance(value, ast.Call) or not isinstance(value.func, ast.Name):
        return None
    called = getattr(function, "__globals__", {}).get(value.func.id)
    if not inspect.isgeneratorfunction(called):
        return None
    return f"'{ast.unparse(value)}' makes a generator that never runs; write 'yield from {ast.unparse(value)}'"


def _acts(value: ast.expr) -> bool:
    return any(isinstance(node, _ACTS) for node in ast.walk(value))
