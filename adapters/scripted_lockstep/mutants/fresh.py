"""Fresh mutants: single edits of the scheduler and its memory by the operators of mutation testing.

They are drawn by a seed, so the share that a search finds measures the search. ``fresh:MODULE.PATH.N`` names the N-th
edit of a function, for searches, replays and shrinking.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import random
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import engine.core
from scripted.core.edits import EditDoesNotFit
from scripted.core.mutant import Mutant
from scripted.core.refusals import ScriptDefinitionError

_PREFIX: Final = "fresh:"
_NAME: Final = re.compile(r"fresh:((?:scheduler|memory)\.\w+)\.([\w.]+)\.(\d+)")
_PACKAGES: Final = ("scheduler", "memory")
# Modules whose output only people read.
_TEXTS: Final = frozenset({"__repr__", "__str__"})
# The audit has no effect, so a bug in it says nothing about a search.
_AUDITS: Final = frozenset({"check", "memory.integrity"})
_COMPARED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED: Final[dict[type[ast.operator], type[ast.operator]]] = {ast.Add: ast.Sub, ast.Sub: ast.Add}
_DROPPED: Final = (ast.Expr, ast.Assign, ast.AugAssign, ast.Delete, ast.Raise, ast.Continue, ast.Break)


class _Edit(NamedTuple):
    """One edit of a function: the replacement of a node."""

    node: ast.expr | ast.stmt
    becomes: str


def fresh_mutant(name: str) -> Mutant | None:
    """Return the mutant of this name; None for any other name. Raises ScriptDefinitionError for a wrong number."""
    if not name.startswith(_PREFIX):
        return None
    found = _NAME.fullmatch(name)
    mutants = dict(_mutants_of(found[1])).get(found[2], ()) if found and found[1] in _modules() else ()
    if not found or int(found[3]) >= len(mutants):
        raise ScriptDefinitionError(
            f"a fresh mutant is fresh:MODULE.PATH.N, where N counts the edits of one function, got {name!r}; "
            "benchmarks/tables/fresh_mutants.md has some"
        )
    return mutants[int(found[3])]


def fresh_sample(count: int, seed: int) -> dict[str, str]:
    """Draw names from all edits, each with its description. An edit that does not apply is replaced by another one."""
    every = [mutant for module in _modules() for _, mutants in _mutants_of(module) for mutant in mutants]
    random.Random(seed).shuffle(every)  # noqa: S311 - reproducible by design
    sample: dict[str, str] = {}
    for mutant in every:
        if len(sample) == count:
            break
        with contextlib.suppress(EditDoesNotFit), mutant.switched_on():
            sample[mutant.name] = mutant.bug
    return sample


def edits_met(codes: Container[int], count: int) -> list[str]:
    """Draw names from the edits of functions that were called, given by the ids of their code."""
    met: list[str] = []
    for module in _modules():
        for _, mutants in _mutants_of(module):
            if mutants and mutants[0].is_met(codes):
                met += [mutant.name for mutant in mutants]
    random.Random(0).shuffle(met)  # noqa: S311 - reproducible by design
    return met[:count]


def _modules() -> Iterator[str]:
    root = Path(engine.core.__file__).parent
    for package in _PACKAGES:
        modules = [f"{package}.{file.stem}" for file in sorted((root / package).glob("*.py"))]
        yield from [module for module in modules if module not in _AUDITS]


@functools.cache
def _mutants_of(module: str) -> tuple[tuple[str, tuple[Mutant, ...]], ...]:
    """Yield the path and the mutants of each function of a module."""
    text = (Path(engine.core.__file__).parent / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
    functions = _functions(ast.parse(text).body, "")
    return tuple([(path, tuple(_of_function(module, path, node, text))) for path, node in functions])


def _functions(body: list[ast.stmt], owner: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in body:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{owner}{node.name}.")
        elif isinstance(node, ast.FunctionDef) and node.name not in _TEXTS | _AUDITS:
            yield owner + node.name, node


def _of_function(module: str, path: str, function: ast.FunctionDef, text: str) -> Iterator[Mutant]:
    lines = text.splitlines(keepends=True)
    first = min([function.lineno, *(node.lineno for node in function.decorator_list)]) - 1
    body = function.body[1 if ast.get_docstring(function) else 0 :]
    own = lines[first : function.end_lineno]
    for number, edit in enumerate(_edits(function, body)):
        node = edit.node
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        before = lines[node.lineno - 1].encode()[: node.col_offset].decode()
        after = lines[node.end_lineno - 1].encode()[node.end_col_offset :].decode()
        top, bottom = node.lineno - 1 - first, node.end_lineno - first
        becomes = before + edit.becomes + after
        # Includes enough lines around it to be unique.
        while "".join(own).count("".join(own[top:bottom])) > 1:
            if bottom < len(own):
                becomes += own[bottom]
                bottom += 1
            else:
                top -= 1
                becomes = own[top] + becomes
        indent = len(own[0]) - len(own[0].lstrip())
        yield Mutant(
            name=f"{_PREFIX}{module}.{path}.{number}",
            origin="drawn",
            bug=_said(node, edit.becomes),
            signature="",
            test="",
            target=f"engine.core.{module}:{path}",
            cut=_dedented("".join(own[top:bottom]), indent),
            becomes=_dedented(becomes, indent),
        )


def _said(node: ast.expr | ast.stmt, becomes: str) -> str:
    return f"line {node.lineno}: {' '.join(ast.unparse(node).split())} -> {' '.join(becomes.split())}"


def _dedented(text: str, indent: int) -> str:
    return re.sub(rf"(?m)^ {{{indent}}}", "", text)


def _edits(function: ast.FunctionDef, body: list[ast.stmt]) -> Iterator[_Edit]:
    """Yield the edits of every node except texts, assertions, annotations and type checks, and early returns."""
    is_constructor = function.name == "__init__"
    for edit in itertools.chain.from_iterable(map(_edits_in, body)):
        # Not mutated: a missing attribute fails at once, which does not measure a search.
        if not (is_constructor and edit.becomes == "pass"):
            yield edit
    returns = function.returns
    if isinstance(returns, ast.Constant) and returns.value is None and not is_constructor:
        yield from (_Edit(node, "return") for node in body[1:] if not isinstance(node, ast.Return))


def _edits_in(node: ast.AST) -> Iterator[_Edit]:
    if isinstance(node, ast.Assert | ast.JoinedStr):
        return
    if isinstance(node, ast.expr | ast.stmt):
        yield from (_Edit(node, becomes) for becomes in _becomes(node))
    if isinstance(node, ast.Raise):
        return
    if isinstance(node, ast.If | ast.While | ast.IfExp):
        yield _Edit(node.test, f"(not ({ast.unparse(node.test)}))")
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "args", "keywords") and not isinstance(node, ast.Call):
            continue
        for one in value if isinstance(value, list) else (value,):
            if isinstance(one, ast.AST):
                yield from _edits_in(one)


def _becomes(node: ast.expr | ast.stmt) -> Iterator[str]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in _COMPARED:
            yield f"({ast.unparse(ast.Compare(left, [_COMPARED[type(op)]()], [right]))})"
        case ast.BoolOp(op, values):
            other = ast.And() if isinstance(op, ast.Or) else ast.Or()
            yield f"({ast.unparse(ast.BoolOp(other, values))})"
        case ast.UnaryOp(ast.Not(), operand):
            yield f"({ast.unparse(operand)})"
        case ast.BinOp(left, op, right) if type(op) in _COMPUTED:
            yield f"({ast.unparse(ast.BinOp(left, _COMPUTED[type(op)](), right))})"
        case ast.Constant(value) if isinstance(value, bool):
            yield str(not value)
        case ast.Constant(value) if isinstance(value, int):
            yield from (f"({value + 1})", f"({value - 1})")
        case ast.Expr(ast.Constant()):
            return  # A docstring.
        case ast.stmt() if isinstance(node, _DROPPED):
            yield "pass"
