"""Operators: every small change of one source file that could be a bug, each with a stable name.

Owns what is changed and what is left out by rule (texts, annotations, class bodies). It runs nothing.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Any, Final

import msgspec

__all__ = ["MODULE", "Mutant", "mutants_of", "mutated"]

# The function of what stands outside of all functions.
MODULE: Final = "<module>"
_TEXT_LIMIT_CHARACTERS: Final = 70
# What is written for a person to read; and the functions and files that only object to what others did.
_TEXT_FUNCTIONS: Final = frozenset({"__repr__", "__str__"})
_GUARD_FUNCTIONS: Final = re.compile(r"_?(check|audit)(_|$)")
_GUARD_FILES: Final = re.compile(r"(^|/)integrity/")

_COMPARISONS: Final[dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_ARITHMETIC: Final[dict[type[ast.operator], type[ast.operator]]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
_CALLS: Final = {"min": "max", "max": "min", "any": "all", "all": "any"}
_BODIES: Final = ("body", "orelse", "finalbody")


class Mutant(msgspec.Struct, frozen=True, kw_only=True):
    """One change. ``first_line`` to ``last_line`` are the lines of its statement, without a body that it may have.

    ``guard`` says that it changes what only objects to other bugs; ``number`` is its place among those of its file.
    """

    file: str
    line: int
    column: int
    operator: str
    before: str
    after: str
    function: str
    guard: bool
    first_line: int
    last_line: int
    number: int

    @property
    def id(self) -> str:
        """``FILE:LINE:COLUMN OPERATOR BEFORE -> AFTER``."""
        return f"{self.file}:{self.line}:{self.column} {self.operator} {self.before} -> {self.after}"


class _Edit(msgspec.Struct, frozen=True):
    """Put ``new`` into a field of ``owner``; ``index`` where that field is a list."""

    mutant: Mutant
    owner: Any
    field: str
    index: int | None
    new: Any

    def apply(self) -> None:
        if self.index is None:
            setattr(self.owner, self.field, self.new)
        else:
            getattr(self.owner, self.field)[self.index] = self.new


def mutants_of(file: str, source: str) -> list[Mutant]:
    """All mutants of a source file, top down. A few compile to what was there: who switches one on is told."""
    return [edit.mutant for edit in _Walk(file).edits(ast.parse(source))]


def mutated(source: str, mutant: Mutant) -> ast.Module:
    """The file with one mutant in it."""
    tree = ast.parse(source)
    edit = list(_Walk(mutant.file).edits(tree))[mutant.number]
    assert edit.mutant == mutant, f"the source has changed: {mutant.id} is {edit.mutant.id} now"
    edit.apply()
    return ast.fix_missing_locations(tree)


class _Walk:
    """Goes through one file and says what could be changed in it."""

    def __init__(self, file: str) -> None:
        self._file = file
        self._functions: list[str] = []
        self._inside = False
        self._statement: ast.stmt | None = None
        self._guard = False
        self._count = 0

    def edits(self, tree: ast.Module) -> Iterator[_Edit]:
        """Top down, in a fixed order."""
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield from self._definition(node)
            elif isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                self._statement = node
                yield from self._here(node.value)

    def _definition(self, node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> Iterator[_Edit]:
        if node.name in _TEXT_FUNCTIONS:
            return
        guard, self._guard = self._guard, self._guard or bool(_GUARD_FUNCTIONS.match(node.name))
        # What is defined inside of a function is part of its code.
        names, self._functions = self._functions, self._functions + ([] if self._inside else [node.name])
        inside, self._inside = self._inside, self._inside or not isinstance(node, ast.ClassDef)
        if isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield from self._definition(inner)
        else:
            self._statement = node
            for default in [*node.args.defaults, *node.args.kw_defaults]:
                if isinstance(default, ast.Constant):
                    yield from self._here(default)
            yield from self._removals(node)
            for statement in node.body:
                yield from self._visit(statement)
        self._functions, self._inside = names, inside
        self._guard = guard

    def _visit(self, node: ast.AST) -> Iterator[_Edit]:
        if _is_text(node):
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from self._definition(node)
            return
        outside = self._statement, self._guard
        if isinstance(node, ast.stmt):
            self._statement = node
        yield from self._here(node)
        for name, child in _children(node):
            objects = (name == "test" and _only_objects(node)) or _is_strictness(node)
            inside, self._guard = self._guard, self._guard or objects
            yield from self._visit(child)
            self._guard = inside
        self._statement, self._guard = outside

    def _here(self, node: ast.AST) -> Iterator[_Edit]:
        inside, self._guard = self._guard, self._guard or _only_objects(node)
        for operator, name, index, new in _changes_of(node):
            old = getattr(node, name) if index is None else getattr(node, name)[index]
            yield self._edit(operator, (node, name, index), old, new)
        self._guard = inside
        yield from self._removals(node)

    def _removals(self, node: ast.AST) -> Iterator[_Edit]:
        """A statement less, where it can be missing."""
        for name in _BODIES:
            body = getattr(node, name, None)
            for index, statement in enumerate(body if isinstance(body, list) else []):
                if not _is_text(statement) and _can_be_missing(statement):
                    outside = self._statement, self._guard
                    self._statement = statement
                    self._guard = outside[1] or isinstance(statement, ast.Assert) or _only_checks(statement)
                    yield self._edit("remove", (node, name, index), statement, ast.Pass())
                    self._statement, self._guard = outside

    def _edit(self, operator: str, place: tuple[ast.AST, str, int | None], old: Any, new: Any) -> _Edit:
        owner, name, index = place
        at = old if hasattr(old, "lineno") else _behind(owner, index)
        assert self._statement is not None
        mutant = Mutant(
            file=self._file,
            line=at.lineno,
            column=at.col_offset,
            operator=operator,
            before=_shown(old),
            after=_shown(new),
            function=".".join(self._functions) or MODULE,
            guard=self._guard or bool(_GUARD_FILES.search(self._file)),
            first_line=_first_line(self._statement),
            last_line=_last_line(self._statement),
            number=self._count,
        )
        self._count += 1
        return _Edit(mutant, owner, name, index, new)


def _behind(owner: Any, index: int | None) -> Any:
    """What stands behind an operator: its own place in the source is not known."""
    if isinstance(owner, ast.Compare):
        return owner.comparators[index or 0]
    return getattr(owner, "right", owner)


def _changes_of(node: ast.AST) -> Iterator[tuple[str, str, int | None, Any]]:
    """(operator, field, index, new value) of each change of one node."""
    match node:
        case ast.Compare():
            for index, old in enumerate(node.ops):
                for new in _COMPARISONS[type(old)]:
                    yield "compare", "ops", index, new()
        case ast.BoolOp():
            yield "boolean", "op", None, ast.Or() if isinstance(node.op, ast.And) else ast.And()
        case ast.UnaryOp(op=ast.Not()):
            yield "negate", "operand", None, ast.UnaryOp(ast.Not(), node.operand)
        case ast.UnaryOp(op=ast.USub()):
            yield "arithmetic", "op", None, ast.UAdd()
        case ast.BinOp() | ast.AugAssign() if type(node.op) in _ARITHMETIC:
            yield "arithmetic", "op", None, _ARITHMETIC[type(node.op)]()
        case ast.Constant():
            for value in _other_values(node.value):
                yield "constant", "value", None, value
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield "call", "func", None, ast.copy_location(ast.Name(_CALLS[name], ast.Load()), node.func)
        case ast.If() | ast.While() | ast.IfExp() if not _is_negated_elsewhere(node.test):
            yield "negate", "test", None, ast.UnaryOp(ast.Not(), node.test)
        case ast.comprehension():
            for index, test in enumerate(node.ifs):
                if not _is_negated_elsewhere(test):
                    yield "negate", "ifs", index, ast.UnaryOp(ast.Not(), test)
        case ast.Return() if node.value is not None and not isinstance(node.value, ast.Constant):
            yield "return", "value", None, ast.Constant(None)


def _other_values(value: object) -> tuple[object, ...]:
    if isinstance(value, bool):
        return (not value,)
    return (value + 1, value - 1) if isinstance(value, int | float) else ()


def _is_negated_elsewhere(test: ast.expr) -> bool:
    """A comparison and a ``not`` have changes of their own that negate them."""
    return isinstance(test, ast.UnaryOp | ast.Constant) or (isinstance(test, ast.Compare) and len(test.ops) == 1)


def _can_be_missing(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assign | ast.AnnAssign):
        # Without a name of its own the function would only fail: no developer writes such a bug.
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        return statement.value is not None and all(isinstance(one, ast.Attribute | ast.Subscript) for one in targets)
    bare = isinstance(statement, ast.Return) and statement.value is None
    return bare or isinstance(statement, ast.Expr | ast.AugAssign | ast.Delete | ast.Assert | ast.Continue | ast.Break)


def _is_text(node: ast.AST) -> bool:
    """Docstrings, and what a person reads when something is wrong."""
    docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return docstring or isinstance(node, ast.Raise | ast.JoinedStr)


def _only_objects(node: ast.AST) -> bool:
    """An assertion, or a condition of nothing but an error."""
    if isinstance(node, ast.If):
        return not node.orelse and all(isinstance(inner, ast.Raise) for inner in node.body)
    return isinstance(node, ast.Assert)


def _is_strictness(node: ast.AST) -> bool:
    """``strict=True`` of a zip."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _only_checks(statement: ast.stmt) -> bool:
    """A call of what only objects."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return False
    function = statement.value.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    return _GUARD_FUNCTIONS.match(name) is not None


def _children(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    for name, value in ast.iter_fields(node):
        if name in {"annotation", "msg", "ctx", "op", "ops"}:
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield name, child


def _first_line(statement: ast.stmt) -> int:
    """A function's code begins at its first decorator."""
    decorators: list[ast.expr] = getattr(statement, "decorator_list", [])
    return min([statement.lineno, *(one.lineno for one in decorators)])


def _last_line(statement: ast.stmt) -> int:
    body = getattr(statement, "body", None)
    last = statement.end_lineno or statement.lineno
    return max(statement.lineno, body[0].lineno - 1) if isinstance(body, list) else last


_SYMBOLS: Final = {
    "Lt": "<", "LtE": "<=", "Gt": ">", "GtE": ">=", "Eq": "==", "NotEq": "!=", "Is": "is", "IsNot": "is not",
    "In": "in", "NotIn": "not in", "And": "and", "Or": "or", "Add": "+", "Sub": "-", "Mult": "*", "FloorDiv": "//",
    "Div": "/", "Mod": "%", "BitOr": "|", "BitAnd": "&", "USub": "-", "UAdd": "+",
}  # fmt: skip


def _shown(value: object) -> str:
    if not isinstance(value, ast.AST):
        return repr(value)
    symbol = _SYMBOLS.get(type(value).__name__)
    text = " ".join(ast.unparse(ast.fix_missing_locations(value)).split()) if symbol is None else symbol
    return text if len(text) <= _TEXT_LIMIT_CHARACTERS else text[: _TEXT_LIMIT_CHARACTERS - 3] + "..."
