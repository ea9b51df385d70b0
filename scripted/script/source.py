"""Static checks of a script's source: statements without an effect, assertions that always hold.

Reads a function's source and never runs it. A function whose source cannot be found passes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import types
from collections.abc import Callable, Generator, Iterator, Mapping
from typing import Final

import msgspec

ScriptFunction = Callable[..., Generator[object, None, object]]

_DROPPED: Final = (ast.Attribute, ast.Constant, ast.Name, ast.Lambda, ast.GeneratorExp, ast.UnaryOp)
_DROPPED_WITHOUT_CALLS: Final = (ast.BoolOp, ast.BinOp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript)
# Attributes whose values are words of a vocabulary.
_WORDS: Final = frozenset({"finish_reason", "mode", "paused", "status"})
_MIRRORED: Final = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.NotEq: ast.NotEq}
# Waits of ``t``, which run steps and return None.
WAITS: Final = frozenset(
    {
        "advance_to_decode_step",
        "advance_to_nth_chunk",
        "advance_to_stage",
        "run_until",
        "run_until_all_finished",
        "run_until_finished",
        "run_until_idle",
        "warmup_radix",
    }
)
_RETURN_NONE: Final = frozenset({"add", "append", "clear", "extend", "insert", "reverse", "sort", "update"})
# Attributes of a handle that are never None, before, during or after the life of its request.
_ALWAYS_THERE: Final = frozenset({"client", "output_ids", "prompt_ids", "rid", "sampling", "status"})
# Functions without side effects.
_ANSWERS: Final = frozenset(
    {"abs", "all", "any", "bool", "callable", "enumerate", "filter", "float", "hasattr", "int", "isinstance", "len"}
) | {"map", "max", "min", "range", "repr", "reversed", "round", "sorted", "str", "sum", "zip"}
# Checks that expect an error in the block below, or in a function passed to them.
_EXPECTS_BELOW: Final = frozenset({"raises", "warns", "deprecated_call", "assertRaises", "assertRaisesRegex"})
_FIXED: Final = (str, int, float, bool, type(None), tuple, frozenset)
_LOOKS: Final = frozenset({"len", "list", "max", "min", "set", "sorted", "str", "sum", "tuple"})
_ACTS: Final = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def file_of(function: Callable[..., object]) -> str:
    """Return the file in which a function was written, even if a decorator of another file wraps it."""
    return code_of(function).co_filename


def code_of(function: Callable[..., object]) -> types.CodeType:
    """Return the function's own code, below decorators that set ``__wrapped__``."""
    code: types.CodeType = inspect.unwrap(function).__code__
    return code


def idle_statements(function: types.FunctionType) -> Iterator[str]:
    """Yield ``line N: the fault, and the remedy`` for each statement of a script that neither tests nor does anything.

    Helpers in the script's file, called by name or as methods of its class, follow the script.
    """
    file, code = file_of(function), code_of(function)
    definitions = _definitions_in(file)
    own = definitions.get((code.co_qualname, code.co_firstlineno))
    if own is None:
        return
    for definition in _with_helpers(own, definitions):
        for statement in _statements(definition.node.body):
            why = _why_idle(statement, function) or (definition is own and _why_returned(own, statement)) or None
            why = why or _why_not_asked(statement, definition, definitions)
            if why is not None:
                where = "" if definition is own else f" of {definition.name}(...)"
                yield f"line {statement.lineno}{where}: {why}"


class _Definition(msgspec.Struct, frozen=True, eq=False):
    """A function in a file: its qualified name, and the name of the class around it."""

    name: str
    node: ast.FunctionDef

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]


def _definitions_in(file: str) -> dict[tuple[str, int], _Definition]:
    """Return the functions of a file and of its classes, by qualified name and first line, decorators included."""
    linecache.checkcache(file)
    return _definitions_of("".join(linecache.getlines(file)))


@functools.lru_cache(maxsize=64)
def _definitions_of(source: str) -> dict[tuple[str, int], _Definition]:
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return {}
    return {
        (one.name, min([one.node.lineno, *(decorator.lineno for decorator in one.node.decorator_list)])): one
        for one in _functions_of(tree, "")
    }


def _functions_of(node: ast.Module | ast.ClassDef, owner: str) -> Iterator[_Definition]:
    for child in node.body:
        if isinstance(child, ast.FunctionDef):
            yield _Definition(f"{owner}{child.name}", child)
        elif isinstance(child, ast.ClassDef):
            yield from _functions_of(child, f"{owner}{child.name}.")


def _with_helpers(own: _Definition, definitions: Mapping[tuple[str, int], _Definition]) -> list[_Definition]:
    found = [own]
    for definition in found:
        for node in ast.walk(definition.node):
            helper = _called_helper(node, definition, definitions) if isinstance(node, ast.Call) else None
            if helper is not None and helper not in found:
                found.append(helper)
    return found


def _called_helper(
    call: ast.Call, caller: _Definition, definitions: Mapping[tuple[str, int], _Definition]
) -> _Definition | None:
    """Find the function in the same file that a call refers to, by name or as a method of the caller's class."""
    match call.func:
        case ast.Name(id=name):
            pass
        case ast.Attribute(value=owner, attr=attribute) if ast.unparse(owner) in ("self", "cls", caller.owner):
            name = f"{caller.owner}.{attribute}"
        case _:
            return None
    found = [one for one in definitions.values() if one.name == name]
    return found[0] if len(found) == 1 else None


def _returns_of(node: ast.AST) -> Iterator[ast.Return]:
    """Yield the return statements of a function, except those of nested functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _returns_of(child)


def _why_returned(own: _Definition, statement: ast.stmt) -> str | None:
    """Explain why a comparison that a script returns tests nothing: nothing reads a script's result."""
    match statement:
        case ast.Return(value=ast.expr() as value) if _is_condition(value) and statement in _returns_of(own.node):
            text = ast.unparse(value)
            return f"'return {text}' has no caller that would check it; write 'assert {text}'"
    return None


def _why_not_asked(
    statement: ast.stmt, definition: _Definition, definitions: Mapping[tuple[str, int], _Definition]
) -> str | None:
    """Explain a dropped result of a helper, or a comparison that is stored and never read."""
    match statement:
        case ast.Expr(value=ast.Call() as call) if helper := _called_helper(call, definition, definitions):
            returned = [one.value for one in _returns_of(helper.node) if one.value is not None]
            if returned and (all(map(_is_condition, returned)) or _only_answers(helper.node)):
                text = ast.unparse(call)
                return f"'{text}' returns whether it holds, and the result is dropped; write 'assert {text}'"
        case ast.Assign(value=ast.YieldFrom(value=ast.Call(func=ast.Attribute(attr=name))) as wait) if name in WAITS:
            return f"'{ast.unparse(wait)}' returns None; query the engine instead of {ast.unparse(statement)}"
        case ast.Assign(value=value) if _is_condition(value) and _is_never_read(statement, definition.node):
            text = ast.unparse(value)
            return f"'{text}' is stored and never read; write 'assert {text}'"
    return None


def _is_never_read(statement: ast.Assign, function: ast.FunctionDef) -> bool:
    """Return whether an assignment only sets local names that the function never reads."""
    if not all(isinstance(target, ast.Name) for target in statement.targets):
        return False
    used: set[str] = set()
    for node in ast.walk(function):
        match node:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                used.update(names)
            case ast.Name(id=name, ctx=ast.Load()):
                used.add(name)
    return not any(isinstance(target, ast.Name) and target.id in used for target in statement.targets)


def _only_answers(function: ast.FunctionDef) -> bool:
    """Return whether a function only returns a value."""
    acts = (ast.Assert, ast.Raise, ast.Global, ast.Nonlocal, ast.With, ast.Delete, *_ACTS)
    for node in (node for statement in function.body for node in ast.walk(statement)):
        match node:
            case ast.Attribute(ctx=ast.Store()) | ast.Subscript(ctx=ast.Store()):
                return False
            case _ if isinstance(node, acts):
                return False
    return True


def _is_condition(value: ast.expr) -> bool:
    match value:
        case ast.BoolOp(values=values):
            return all(map(_is_condition, values))
        case ast.Call(func=ast.Name(id="all" | "any" | "isinstance")) | ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return True
    return False


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield every statement except those inside pytest.raises, where reading a value is a test."""
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


def _why_idle(statement: ast.stmt, function: types.FunctionType) -> str | None:
    match statement:
        case ast.Assert(test=test):
            return _why_always_true(test) or _why_fixed(test, function)
        case ast.Expr(value=value):
            return _why_dropped(value, ast.unparse(value), function.__globals__)
    return None


def _why_dropped(value: ast.expr, text: str, names: Mapping[str, object]) -> str | None:
    """Explain an expression statement without an effect; ``names`` are its file's globals."""
    match value:
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return f"'{text}' is computed and dropped; write 'assert {text}'"
        case ast.YieldFrom(value=ast.Call(args=[ast.Lambda(body=ast.Constant()), *_])):
            return f"'{text}' waits for a constant; let the predicate query the engine"
        case ast.Call(func=ast.Name(id=name)) if inspect.isgeneratorfunction(names.get(name)):
            return f"'{text}' makes a generator that never runs; write 'yield from {text}'"
        case ast.Call(func=ast.Name(id=name)) if name in _ANSWERS and name not in names:
            return f"'{text}' is computed and dropped; assert something about it, or loop over the calls that it makes"
        case ast.Call(func=ast.Attribute(attr="sometimes"), args=[_, condition]) if _always_holds(condition):
            return f"'{text}' is a window that is always open; ask for what only the race brings about"
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=args):
            if name in _EXPECTS_BELOW and len(args) < 2:
                return f"'{text}' expects an error of nothing; write 'with {text}:' around what must raise it"
        case ast.Constant(value=constant) if isinstance(constant, (str, type(...))):
            return None
        case _ if isinstance(value, _DROPPED) or (isinstance(value, _DROPPED_WITHOUT_CALLS) and not _acts(value)):
            return f"'{text}' does nothing; call it, or assert something about it"
    return None


def _why_fixed(test: ast.expr, function: types.FunctionType) -> str | None:
    """Explain an assertion on constants, including the file's own, which no run changes."""
    inside = list(ast.walk(test))
    names = {node.id for node in inside if isinstance(node, ast.Name)}
    code, values = code_of(function), function.__globals__
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if not names or names & local or any(isinstance(node, _ACTS) for node in inside):
        return None
    is_fixed = all(
        type(values.get(name, function)) in _FIXED and not _is_set_by_functions(name, function) for name in names
    )
    return f"'assert {ast.unparse(test)}' compares constants, which no run changes" if is_fixed else None


def _is_set_by_functions(name: str, function: Callable[..., object]) -> bool:
    source = "".join(linecache.getlines(file_of(function)))
    return re.search(rf"^\s+global\b.*\b{re.escape(name)}\b", source, re.MULTILINE) is not None


def _why_always_true(test: ast.expr) -> str | None:
    text = ast.unparse(test)
    match test:
        case ast.Tuple(elts=[_, *_]):
            return f"'assert {text}' always holds, because a tuple is true; leave the parentheses out"
        case ast.List(elts=[_, *_]) | ast.Set() | ast.Dict(keys=[_, *_]):
            return f"'assert {text}' always holds, because a collection with elements is true; leave the brackets out"
        case ast.ListComp(elt=one, generators=loops) | ast.SetComp(elt=one, generators=loops) if (
            _is_condition(one) or not loops[0].ifs
        ):
            return f"'assert {text}' asks only whether there is anything in it; write all(...)"
        case ast.BoolOp(op=ast.Or(), values=values) if any(map(_always_holds, values)):
            return f"'assert {text}' always holds, because a part of it is always true; compare each part"
        case ast.BoolOp(op=ast.And(), values=values):
            return next(filter(None, map(_why_always_true, values)), None)
        case ast.IfExp(body=body, orelse=orelse) if _always_holds(body) or _always_holds(orelse):
            return f"'assert {text}' always holds on one side; write an if with an assertion"
        case ast.Compare():
            return _why_no_comparison(test, text)
        case ast.Call(func=ast.Name(id="isinstance"), args=[ast.Attribute(attr=name), *_]) if name in _ALWAYS_THERE:
            return f"'assert {text}' asks for a type that it always has; compare it with what must be there"
    return f"'assert {text}' always holds" if _always_holds(test) else None


def _always_holds(test: ast.expr) -> bool:
    match test:
        case (
            ast.Lambda()
            | ast.GeneratorExp()
            | ast.JoinedStr()
            | ast.Set()
            | ast.Tuple(elts=[_, *_])
            | ast.List(elts=[_, *_])
            | ast.Dict(keys=[_, *_])
        ):
            return True
        case ast.Constant(value=value):
            return bool(value)
        case ast.Compare():
            return _why_it_holds(test) is not None
    return False


def _why_no_comparison(test: ast.Compare, text: str) -> str | None:
    """Explain an identity test of equal values, or a substring test meant as a choice among words."""
    if (why := _why_it_holds(test)) is not None:
        return f"'assert {text}' always holds, because {why}; compare it with what must be there"
    match test:
        case ast.Compare(ops=[ast.Is() | ast.IsNot()], comparators=[ast.Constant(value=value)]) if type(value) in (
            str,
            int,
        ):
            return f"'assert {text}' asks whether it is the very same object; write == or !="
        case ast.Compare(
            left=ast.Attribute(attr=name), ops=[ast.In() | ast.NotIn()], comparators=[ast.Constant(value=str())]
        ) if name in _WORDS:
            return f"'assert {text}' looks for a part of a text; write a tuple of words"
    return None


def _is_singleton(value: ast.expr) -> bool:
    """Return whether an expression may be the same object each time: a constant, None, or a name."""
    return isinstance(value, ast.Constant | ast.Name)


def _why_it_holds(test: ast.Compare) -> str | None:
    if len(test.ops) > 1:
        return None
    left, operator, right = test.left, test.ops[0], test.comparators[0]
    match left, operator, right:
        case ast.Yield(), ast.Is() | ast.Eq(), ast.Constant(value=None):
            return "a yield brings None"
        case ast.Attribute(attr=name), ast.IsNot(), ast.Constant(value=None) if name in _ALWAYS_THERE:
            return f"{ast.unparse(left)} is never None"
        case ast.Call(func=ast.Attribute(attr=one)), ast.Eq(), ast.Call(func=ast.Attribute(attr=other)) if (
            one in _RETURN_NONE and other in _RETURN_NONE
        ):
            return f"{one}() returns None"
        case _, ast.IsNot(), _ if not (_is_singleton(left) or _is_singleton(right)):
            return "two answers are never the same object"
        case _, ast.Eq() | ast.Is() | ast.LtE() | ast.GtE(), _ if ast.dump(left) == ast.dump(right) and not _acts(left):
            return "both sides are the same"
        case ast.Constant(), _, _ if type(operator) in _MIRRORED:
            left, operator, right = right, _MIRRORED[type(operator)](), left
    is_count = isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id in ("len", "abs")
    if is_count and (type(operator), ast.unparse(right)) in ((ast.GtE, "0"), (ast.Gt, "-1"), (ast.NotEq, "-1")):
        return "no length is less than 0"
    return None


def _acts(value: ast.expr) -> bool:
    return any(isinstance(node, _ACTS) and not _only_looks(node) for node in ast.walk(value))


def _only_looks(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOOKS
