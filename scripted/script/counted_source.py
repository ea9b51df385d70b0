"""Instruments a file's source with counters beside its assertions, and keeps pytest's rewriting of assertions.

Changes an AST and compiles it, without importing or running the file.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import copy
import marshal
from collections.abc import Iterator, Sequence
from typing import Final, TypeAlias

import msgspec

from scripted.script.compiled_source import Compiled, kept

# The name of the hooks in an instrumented module; no source can spell it.
HOOKS: Final = "@scripted"
_BUILTINS: Final = frozenset(name for name in dir(builtins) if name.islower()) - {"list", "tuple", "next"}
# Context managers and functions with which test libraries assert.
_EXPECTS: Final = frozenset({"raises", "warns", "deprecated_call", "assertRaises", "assertRaisesRegex", "subtests"})
_OPPOSITES: Final[tuple[tuple[type[ast.cmpop], type[ast.cmpop]], ...]] = (
    (ast.Eq, ast.NotEq),
    (ast.Lt, ast.GtE),
    (ast.Gt, ast.LtE),
    (ast.Is, ast.IsNot),
    (ast.In, ast.NotIn),
)
_OTHER_WAY: Final = dict(_OPPOSITES) | {other: one for one, other in _OPPOSITES}


class Site(msgspec.Struct, frozen=True):
    """A check in a source: ``owner_line`` is the first line of its outermost function, including decorators.

    ``is_assertion`` is false for checks that are not ``assert`` statements, such as ``pytest.raises``.
    """

    file: str
    line: int
    text: str
    owner_line: int
    is_assertion: bool = True
    always_fails: bool = False


class CountedSource(Compiled, frozen=True):
    """A file compiled with counters.

    Its code refers to ``sites`` by index; ``imported`` are the modules that any of its functions imports.
    """

    sites: tuple[Site, ...]
    imported: tuple[str, ...]


def counted(source: bytes, file: str, *, negatable: bool) -> CountedSource:
    """Compile a file with counted assertions.

    With ``negatable``, each assertion can be negated at run time, and each attribute that a function reads can be
    changed.
    """
    how = "negatable" if negatable else "counted"
    return kept(source, file, how, CountedSource, lambda: _counted(source, file, negatable=negatable))


def _counted(source: bytes, file: str, *, negatable: bool) -> CountedSource:
    tree = ast.parse(source, filename=file)
    imported = {name for node in ast.walk(tree) for name in _imports(node)}
    marker = _Marker(file, negatable=negatable)
    tree = marker.visit(tree)
    tree = ast.fix_missing_locations(_Reads().visit(tree) if negatable else tree)
    with contextlib.suppress(ImportError):
        from _pytest.assertion.rewrite import rewrite_asserts

        rewrite_asserts(tree, source, file)
    tree = _Calls().visit(tree)
    for node in ast.walk(tree):
        # A rewritten node ends where it starts, not where its surrounding node ends.
        if isinstance(node, ast.stmt | ast.expr) and hasattr(node, "lineno") and node.end_lineno is None:
            node.end_lineno, node.end_col_offset = node.lineno, node.col_offset
    ast.fix_missing_locations(tree)
    code = marshal.dumps(compile(tree, file, "exec", dont_inherit=True))
    return CountedSource(code, tuple(marker.sites), tuple(sorted(imported)))


def _imports(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        yield "." * node.level + (node.module or "")


def fails_always(statement: ast.stmt) -> bool:
    """Return whether a statement is a ``raise``, ``pytest.fail()`` or ``assert False``."""
    if isinstance(statement, ast.Assert):
        return isinstance(statement.test, ast.Constant) and not statement.test.value
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        return _called(statement.value) == "fail"
    return isinstance(statement, ast.Raise)


# A node, or the statements that replace it.
_Visited: TypeAlias = ast.AST | Sequence[ast.AST]


class _Marker(ast.NodeTransformer):
    """Adds counters before and after each assertion, and before statements that raise if a condition fails."""

    def __init__(self, file: str, *, negatable: bool) -> None:
        self.sites: list[Site] = []
        self._file = file
        self._negatable = negatable
        self._owner_line = 0

    def visit_Assert(self, node: ast.Assert) -> _Visited:
        number = self._add(node, ast.unparse(node.test), always_fails=fails_always(node))
        other = ast.copy_location(ast.Assert(negated(copy.deepcopy(node.test)), node.msg), node)
        node.test = _Elements(number).visit(node.test)
        assertion: ast.stmt = node
        if self._negatable:
            assertion = ast.copy_location(ast.If(_hook("is_negated", number), [other], [node]), node)
        return self._counted(number, assertion)

    def visit_With(self, node: ast.With) -> _Visited:
        expects = any(isinstance(item.context_expr, ast.Call) and _asserts(item.context_expr) for item in node.items)
        return self._visited(node, expects)

    def visit_Expr(self, node: ast.Expr) -> _Visited:
        call = node.value
        if not isinstance(call, ast.Call) or not _asserts(call):
            return self.generic_visit(node)
        number = self._add(node, ast.unparse(node), is_assertion=False)
        self.generic_visit(node)
        call.func = ast.copy_location(_hook("asserting", number, call.func), call.func)
        return self._counted(number, node)

    def _visit_failing(self, node: ast.If | ast.Try | ast.For | ast.While) -> _Visited:
        branches = [*node.body, *node.orelse] if isinstance(node, (ast.If, ast.Try)) else node.orelse
        return self._visited(node, any(map(fails_always, branches)))

    def visit_Match(self, node: ast.Match) -> _Visited:
        return self._visited(node, any(fails_always(statement) for case in node.cases for statement in case.body))

    def _visit_function(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        before = self._owner_line
        self._owner_line = before or min([node.lineno, *(one.lineno for one in node.decorator_list)])
        self.generic_visit(node)
        self._owner_line = before
        return node

    visit_FunctionDef = visit_AsyncFunctionDef = _visit_function  # noqa: N815 - as the visitor calls them
    visit_If = visit_Try = visit_For = visit_While = _visit_failing  # noqa: N815

    def _counted(self, number: int, assertion: ast.stmt) -> list[ast.stmt]:
        """Surround an asserting statement with its counters."""
        begins = [] if isinstance(assertion, ast.Expr) else [_statement("reached", number, assertion)]
        return [*begins, assertion, _statement("held", number, assertion)]

    def _visited(self, node: ast.stmt, asserts: bool) -> _Visited:
        if not asserts:
            return self.generic_visit(node)
        number = self._add(node, ast.unparse(node).partition("\n")[0], is_assertion=False)
        return [_statement("reached", number, node), self.generic_visit(node)]

    def _add(self, node: ast.stmt, text: str, **what: bool) -> int:
        self.sites.append(Site(self._file, node.lineno, text, self._owner_line, **what))
        return len(self.sites) - 1


class _Elements(ast.NodeTransformer):
    """Adds a hook that notes whether an ``all(...)`` assertion had any element."""

    def __init__(self, number: int) -> None:
        self._number = number

    def visit_Call(self, node: ast.Call) -> _Visited:
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "all" and len(node.args) == 1:
            node.args = [ast.copy_location(_hook("elements", self._number, node.args[0]), node)]
        return node


class _Reads(ast.NodeTransformer):
    """Lets the hooks read attributes inside functions."""

    _in_function = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        before, self._in_function = self._in_function, True
        node.body = [self.visit(statement) for statement in node.body]
        self._in_function = before
        return node

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if isinstance(node.value, ast.Name) and node.value.id.startswith("@"):
            return node
        self.generic_visit(node)
        is_private = node.attr.startswith("__")  # its name depends on the surrounding class
        if not self._in_function or is_private or not isinstance(node.ctx, ast.Load):
            return node
        return ast.copy_location(_hook("read", node.value, ast.Constant(node.attr)), node)

    def visit_match_case(self, node: ast.match_case) -> ast.AST:
        """Leave the pattern alone: it makes no calls."""
        if node.guard is not None:
            node.guard = self.visit(node.guard)
        node.body = [self.visit(statement) for statement in node.body]
        return node


class _Calls(ast.NodeTransformer):
    """Passes the results of calls to the hooks, which look for generators that never run, and what is looked in."""

    def visit_Compare(self, node: ast.Compare) -> _Visited:
        self.generic_visit(node)
        if isinstance(node.ops[-1], ast.In | ast.NotIn):
            last = node.comparators[-1]
            node.comparators[-1] = ast.copy_location(_hook("looked_in", last), last)
        return node

    def visit_YieldFrom(self, node: ast.YieldFrom) -> _Visited:
        if isinstance(node.value, ast.Call):
            self.generic_visit(node.value)
            return node
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> _Visited:
        self.generic_visit(node)
        function = node.func
        named: ast.expr = function
        while isinstance(named, ast.Attribute):
            named = named.value
        if isinstance(named, ast.Name) and (named.id.startswith("@") or (named is function and named.id in _BUILTINS)):
            return node
        return ast.copy_location(_hook("made", node), node)


def negated(test: ast.expr) -> ast.expr:
    """Negate every part of a condition that decides it. An assertion that holds both ways tests nothing."""
    match test:
        case ast.Compare(ops=[operator]):
            return ast.copy_location(ast.Compare(test.left, [_OTHER_WAY[type(operator)]()], test.comparators), test)
        case ast.BoolOp(op=operator, values=values):
            other = ast.Or() if isinstance(operator, ast.And) else ast.And()
            return ast.copy_location(ast.BoolOp(other, [negated(value) for value in values]), test)
        case ast.Tuple(elts=elements) | ast.List(elts=elements) | ast.Set(elts=elements):
            test.elts = [negated(one) for one in elements]
        case ast.GeneratorExp(elt=one) | ast.ListComp(elt=one) | ast.SetComp(elt=one):
            test.elt = negated(one)
        case ast.UnaryOp(
            op=ast.Not(), operand=ast.Call(args=[ast.GeneratorExp() | ast.ListComp() as over]) as call
        ) if _called(call) == "any":
            call.args = [negated(over)]
        case ast.UnaryOp(op=ast.Not(), operand=inner):
            return inner
        case ast.Call(args=[ast.GeneratorExp() | ast.ListComp() as over]) if _called(test) == "all":
            test.args = [negated(over)]
        case _:
            return ast.copy_location(ast.UnaryOp(ast.Not(), test), test)
    return test


def _asserts(call: ast.Call) -> bool:
    name = _called(call)
    return name in _EXPECTS or name.startswith("assert")


def _called(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


def _hook(name: str, *arguments: int | ast.expr) -> ast.Call:
    values = [ast.Constant(argument) if isinstance(argument, int) else argument for argument in arguments]
    return ast.Call(ast.Attribute(ast.Name(HOOKS, ast.Load()), name, ast.Load()), values, [])


def _statement(name: str, number: int, node: ast.stmt) -> ast.stmt:
    statement = ast.copy_location(ast.Expr(_hook(name, number)), node)
    statement.end_lineno, statement.end_col_offset = node.lineno, node.col_offset
    return statement
