"""What can be seen wrong in a script before it runs: statements without an effect, assertions that always hold.

Reads a function's source; never runs it. A function whose source cannot be found passes.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
import re
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import msgspec

_DROPPED: Final = (ast.Compare, ast.Attribute, ast.Name, ast.Lambda, ast.GeneratorExp, ast.UnaryOp)
_DROPPED_WITHOUT_CALLS: Final = (ast.BoolOp, ast.BinOp, ast.Tuple, ast.List, ast.Set, ast.Dict, ast.Subscript)
# Attributes whose values are words.
_WORDS: Final = frozenset({"finish_reason", "mode", "paused", "status"})
_MIRRORED: Final = {ast.Lt: ast.Gt, ast.LtE: ast.GtE, ast.Gt: ast.Lt, ast.GtE: ast.LtE, ast.NotEq: ast.NotEq}
# Waits of ``t``, which are there to run steps and bring nothing.
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
# Attributes of a handle that are always there, whatever became of its request.
_ALWAYS_THERE: Final = frozenset({"client", "output_ids", "prompt_ids", "rid", "sampling", "status"})
# Functions that answer and change nothing.
_ANSWERS: Final = frozenset(
    {"abs", "all", "any", "bool", "callable", "enumerate", "filter", "float", "hasattr", "int", "isinstance", "len"}
) | {"map", "max", "min", "range", "repr", "reversed", "round", "sorted", "str", "sum", "zip"}
# What expects an error of the block below it, or of a function that it is given.
_EXPECTS_BELOW: Final = frozenset({"raises", "warns", "deprecated_call", "assertRaises", "assertRaisesRegex"})
_FIXED: Final = (str, int, float, bool, type(None), tuple, frozenset)
_LOOKS: Final = frozenset({"len", "list", "max", "min", "set", "sorted", "str", "sum", "tuple"})
_ACTS: Final = (ast.Call, ast.Await, ast.Yield, ast.YieldFrom, ast.NamedExpr)


def file_of(function: Callable[..., Any]) -> str:
    """The file that a function was written in, also where a decorator of another file stands around it."""
    return code_of(function).co_filename


def code_of(function: Callable[..., Any]) -> types.CodeType:
    """The function's own code, below decorators that say what they wrap."""
    code: types.CodeType = inspect.unwrap(function).__code__
    return code


def idle_statements(function: Callable[..., Any]) -> Iterator[str]:
    """``line N: what it is, and what to write``, for each statement of a script that tests and does nothing.

    Those of the helpers that it calls by name in its own file, or as methods of its class, come after its own.
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
    """A function of a file: its qualified name, and the name of the class around it."""

    name: str
    node: ast.FunctionDef

    @property
    def owner(self) -> str:
        return self.name.rpartition(".")[0]


def _definitions_in(file: str) -> dict[tuple[str, int], _Definition]:
    """The functions at the top of a file and in its classes, by qualified name and first line, decorators included."""
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
    """The function of the same file that this calls, as a name or as a method of the caller's class."""
    function = call.func
    name = None
    if isinstance(function, ast.Name):
        name = function.id
    elif caller.owner and isinstance(function, ast.Attribute) and ast.unparse(function.value) in _ownself(caller):
        name = f"{caller.owner}.{function.attr}"
    found = [one for one in definitions.values() if one.name == name]
    return found[0] if len(found) == 1 else None


def _ownself(caller: _Definition) -> tuple[str, ...]:
    return "self", "cls", caller.owner


def _returns_of(node: ast.AST) -> Iterator[ast.Return]:
    """The return statements of a function, without those of functions inside of it."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Return):
            yield child
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield from _returns_of(child)


def _why_returned(own: _Definition, statement: ast.stmt) -> str | None:
    """A comparison that a script returns to nobody."""
    if not isinstance(statement, ast.Return) or statement not in _returns_of(own.node):
        return None
    if statement.value is not None and _is_condition(statement.value):
        text = ast.unparse(statement.value)
        return f"'return {text}' is seen by nobody; write 'assert {text}'"
    return None


def _why_not_asked(
    statement: ast.stmt, definition: _Definition, definitions: Mapping[tuple[str, int], _Definition]
) -> str | None:
    """The answer of a helper that is dropped; a comparison that is stored and never read."""
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        helper = _called_helper(statement.value, definition, definitions)
        returned = [] if helper is None else [one.value for one in _returns_of(helper.node) if one.value is not None]
        if returned and (all(map(_is_condition, returned)) or (helper is not None and _only_answers(helper.node))):
            text = ast.unparse(statement.value)
            return f"'{text}' answers whether it holds, and nobody asks; write 'assert {text}'"
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.YieldFrom):
        waited = statement.value.value
        if isinstance(waited, ast.Call) and isinstance(waited.func, ast.Attribute) and waited.func.attr in WAITS:
            return f"'{ast.unparse(statement.value)}' brings None; ask the engine instead of {ast.unparse(statement)}"
    if isinstance(statement, ast.Assign) and _is_condition(statement.value):
        names = {node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)}
        only_names = all(isinstance(target, ast.Name) for target in statement.targets)
        outer = {
            name
            for node in ast.walk(definition.node)
            if isinstance(node, (ast.Global, ast.Nonlocal))
            for name in node.names
        }
        if only_names and not names & (outer | _read_in(definition.node)):
            text = ast.unparse(statement.value)
            return f"'{text}' is stored and never read; write 'assert {text}'"
    return None


def _only_answers(node: ast.FunctionDef) -> bool:
    """Whether a function can do nothing but return a value."""
    acts = (ast.Assert, ast.Raise, ast.Global, ast.Nonlocal, ast.With, ast.Delete, *_ACTS)
    inside = [inner for statement in node.body for inner in ast.walk(statement)]
    stores = (
        isinstance(inner, (ast.Attribute, ast.Subscript)) and isinstance(inner.ctx, ast.Store) for inner in inside
    )
    return not any(isinstance(inner, acts) for inner in inside) and not any(stores)


def _read_in(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Load)}


def _is_condition(value: ast.expr) -> bool:
    if isinstance(value, ast.BoolOp):
        return all(map(_is_condition, value.values))
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return value.func.id in ("all", "any", "isinstance")
    return isinstance(value, ast.Compare) or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not))


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
        return _why_always_true(statement.test) or _why_fixed(statement.test, function)
    if not isinstance(statement, ast.Expr):
        return None
    value, text = statement.value, ast.unparse(statement.value)
    if isinstance(value, ast.Compare) or (isinstance(value, ast.UnaryOp) and isinstance(value.op, ast.Not)):
        return f"'{text}' is worked out and dropped; write 'assert {text}'"
    idle = isinstance(value, _DROPPED) or (isinstance(value, _DROPPED_WITHOUT_CALLS) and not _acts(value))
    if idle or (isinstance(value, ast.Constant) and not isinstance(value.value, (str, type(...)))):
        return f"'{text}' does nothing; call it, or assert something of it"
    return _why_no_predicate(value) or _why_never_run(value, function) or _why_no_answer(value, function)


def _why_no_answer(value: ast.expr, function: Callable[..., Any]) -> str | None:
    """The answer of a builtin that is dropped; an error that is expected of nothing."""
    if not isinstance(value, ast.Call):
        return None
    text, called = ast.unparse(value), value.func
    is_builtin = isinstance(called, ast.Name) and called.id not in getattr(function, "__globals__", {})
    if is_builtin and called.id in _ANSWERS:  # type: ignore[attr-defined]
        return f"'{text}' is worked out and dropped; assert something of it, or write a loop for what it calls"
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    if name in _EXPECTS_BELOW and len(value.args) < 2:
        return f"'{text}' expects an error of nothing; write 'with {text}:' around what must raise it"
    return None


def _why_fixed(test: ast.expr, function: Callable[..., Any]) -> str | None:
    """An assertion on constants, of its file too: the run cannot change it."""
    inside = list(ast.walk(test))
    names = {node.id for node in inside if isinstance(node, ast.Name)}
    code, values = code_of(function), getattr(function, "__globals__", {})
    local = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
    if not names or names & local or any(isinstance(node, _ACTS) for node in inside):
        return None
    is_fixed = all(
        type(values.get(name, function)) in _FIXED and not _is_set_by_functions(name, function) for name in names
    )
    return f"'assert {ast.unparse(test)}' compares constants, which no run changes" if is_fixed else None


def _is_set_by_functions(name: str, function: Callable[..., Any]) -> bool:
    source = "".join(linecache.getlines(file_of(function)))
    return re.search(rf"^\s+global\b.*\b{re.escape(name)}\b", source, re.MULTILINE) is not None


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
    if isinstance(test, (ast.List, ast.Set, ast.Dict)) and not _is_empty(test):
        return f"'assert {text}' always holds, because what has elements is true; leave the brackets out"
    if isinstance(test, (ast.ListComp, ast.SetComp)) and (_is_condition(test.elt) or not test.generators[0].ifs):
        return f"'assert {text}' asks only whether there is anything in it; write all(...)"
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.Or) and any(map(_always_holds, test.values)):
        return f"'assert {text}' always holds, because a part of it is always true; compare each part"
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        return next(filter(None, map(_why_always_true, test.values)), None)
    if isinstance(test, ast.IfExp) and (_always_holds(test.body) or _always_holds(test.orelse)):
        return f"'assert {text}' always holds on one side, whatever is there; write an if with an assertion"
    if isinstance(test, ast.Compare):
        return _why_no_comparison(test, text)
    is_type = isinstance(test, ast.Call) and ast.unparse(test.func) == "isinstance" and bool(test.args)
    if is_type and _is_always_there(test.args[0]):  # type: ignore[attr-defined]
        return f"'assert {text}' asks for a type that it always has; compare it with what must be there"
    return f"'assert {text}' always holds" if _always_holds(test) else None


def _is_always_there(value: ast.expr) -> bool:
    return isinstance(value, ast.Attribute) and value.attr in _ALWAYS_THERE


def _always_holds(test: ast.expr) -> bool:
    if isinstance(test, (ast.Lambda, ast.GeneratorExp, ast.JoinedStr)) or _is_true(test):
        return True
    if isinstance(test, ast.Tuple | ast.List | ast.Set | ast.Dict):
        return not _is_empty(test)
    return isinstance(test, ast.Compare) and _why_it_holds(test) is not None


def _is_empty(test: ast.Tuple | ast.List | ast.Set | ast.Dict) -> bool:
    return not (test.keys if isinstance(test, ast.Dict) else test.elts)


def _is_true(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and bool(value.value)


def _why_no_comparison(test: ast.Compare, text: str) -> str | None:
    """Identity of what is only equal; a part of a text where one of several words is meant."""
    if (why := _why_it_holds(test)) is not None:
        return f"'assert {text}' always holds, because {why}; compare it with what must be there"
    operator, right = test.ops[0], test.comparators[0]
    if len(test.ops) > 1 or not isinstance(right, ast.Constant) or type(right.value) not in (str, int):
        return None
    if isinstance(operator, (ast.Is, ast.IsNot)):
        return f"'assert {text}' asks whether it is the very same object; write == or !="
    is_word = isinstance(test.left, ast.Attribute) and test.left.attr in _WORDS
    if is_word and isinstance(operator, (ast.In, ast.NotIn)):
        return f"'assert {text}' looks for a part of a text; write a tuple of words"
    return None


def _why_it_holds(test: ast.Compare) -> str | None:
    if len(test.ops) > 1:
        return None
    left, operator, right = test.left, test.ops[0], test.comparators[0]
    if isinstance(left, ast.Yield) and isinstance(operator, (ast.Is, ast.Eq)) and ast.unparse(right) == "None":
        return "a yield brings None"
    if isinstance(operator, ast.IsNot) and _is_always_there(left) and ast.unparse(right) == "None":
        return f"{ast.unparse(left)} is never None"
    reflexive = isinstance(operator, (ast.Eq, ast.Is, ast.LtE, ast.GtE)) and not any(map(_acts, (left, right)))
    if reflexive and ast.dump(left) == ast.dump(right):
        return "both sides are the same"
    if isinstance(left, ast.Constant) and type(operator) in _MIRRORED:
        left, operator, right = right, _MIRRORED[type(operator)](), left
    is_count = isinstance(left, ast.Call) and isinstance(left.func, ast.Name) and left.func.id in ("len", "abs")
    bound = ast.unparse(right)
    if is_count and (type(operator), bound) in ((ast.GtE, "0"), (ast.Gt, "-1"), (ast.NotEq, "-1")):
        return "no length is less than 0"
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
    return any(isinstance(node, _ACTS) and not _only_looks(node) for node in ast.walk(value))


def _only_looks(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _LOOKS
