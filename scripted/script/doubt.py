"""Assertions that hold whatever the engine answers: each is asked again with every answer that it reads replaced.

An answer is what an attribute or a query of ``t``, of a handle, or of anything that came from them returns, and a local
variable that was made of one. It is replaced by others that it might have been, alone and with the rest, and only while
the assertion is asked again. Where its condition has parts whose answers are not known, nothing is said of it.
"""

from __future__ import annotations

import ast
import builtins
import copy
import enum
import itertools
import types
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Any, Final

from scripted.script.asked import Method
from scripted.script.handles import BaseRequest
from scripted.script.values import Named, Status, Word

# The methods of ``t`` that only look; asked twice, any other would act twice.
_QUERIES: Final = frozenset(
    {"find_req_by_rid", "is_finished", "is_chunking", "status", "list_active_reqs", "batch_composition"}
    | {"engine_stats", "get_all_node_hit_counts", "get_all_node_lock_refs", "stage"}
)
_PLAIN: Final = (bool, int, float, str, type(None), tuple, list, dict, set, frozenset, enum.Enum)
_CONSTANT: Final = (bool, int, float, str, bytes, type(None), enum.Enum, type, types.ModuleType, types.FunctionType)
_ACTING: Final = frozenset({"next", "iter", "open", "print", "input", "setattr", "delattr", "exec", "eval", "super"})
_BUILTIN: Final = frozenset(dir(builtins))
# What a constant may be made with.
_HARMLESS: Final = frozenset(
    {"range", "list", "tuple", "len", "sum", "min", "max", "str", "int", "sorted", "dict", "set"}
)
_OTHER: Final = "another"
_MANY: Final = 1_000_000
_MANY_ELEMENTS: Final = 100
# Of an assertion in a loop, how often it is asked again.
_MOST_ASKED: Final = 8


class _NotKnownError(Exception):
    """The assertion has a part of which nobody can say what else it might have been."""


class Doubts:
    """The assertions of one run, by number, that have held whatever was answered."""

    failure: Final = Exception

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        # Those that failed once with another answer, or of which nothing can be said.
        self._settled: set[int] = set()
        self._asked: dict[int, int] = {}
        self._round: Iterator[None] | None = None
        # What the assertion reads: the first answer of each text that reads one, and what they are replaced by now.
        self._read: dict[str, Any] = {}
        self._rids: set[str] = set()
        self._instead: dict[str, Any] | None = None

    @property
    def deaf(self) -> frozenset[int]:
        """The numbers of the assertions that no answer could make fail."""
        return frozenset(self._asked) - self._settled

    # -- what counted code calls --

    def doubts(self, number: int) -> bool:
        """Whether the assertion is asked once more, and with which answer replaced."""
        if not self._is_on:
            return False
        if self._round is None:
            if number in self._settled or self._asked.get(number, 0) >= _MOST_ASKED:
                return False
            self._asked[number] = self._asked.get(number, 0) + 1
            self._round = self._answers(number)
        try:
            next(self._round)
        except StopIteration:
            self._round = self._instead = None
            return False
        return True

    def answered(self, number: int, value: object) -> None:
        """It was asked again, and this is its condition."""
        if not value:
            self._settled.add(number)

    def failed(self, number: int) -> None:
        """It raised."""
        self._settled.add(number)

    def look(self, text: str, owner: object, name: str) -> Any:
        """An attribute whose value the condition uses as it is."""
        return self._known(self.part(text, owner, name))

    def part(self, text: str, owner: object, name: str) -> Any:
        """An attribute of which something more is asked."""
        value = getattr(owner, name)
        if isinstance(owner, BaseRequest) and name == "rid":  # the client's own choice
            self._rids.add(value)
            return value
        return value if isinstance(owner, _PLAIN) else self._answer(text, value)

    def owner(self, text: str, value: object) -> Any:
        """A variable of which something more is asked."""
        return self._answer(text, value)

    def ask(self, text: str, owner: object, name: str) -> Callable[..., Any]:
        method = getattr(owner, name)
        if isinstance(owner, (*_PLAIN, types.ModuleType)):
            return method  # type: ignore[no-any-return]
        if not isinstance(method, Method) or name not in _QUERIES:
            raise _NotKnownError
        return lambda *args, **kwargs: self._answer(text, method(*args, **kwargs))

    def known(self, value: object) -> Any:
        """What a call returned, which the condition uses as it is."""
        return self._known(value)

    def local(self, text: str, value: object) -> Any:
        return self._answer(text, self._known(value))

    def truth(self, text: str, value: object) -> Any:
        """A variable that is the whole condition; a function is always true."""
        return value if isinstance(value, types.FunctionType) else self.local(text, value)

    def constant(self, value: object) -> Any:
        """A variable of the module, or one that was made of constants alone."""
        if isinstance(value, _CONSTANT) or (isinstance(value, (tuple, frozenset)) and all(map(self.constant, value))):
            return value
        raise _NotKnownError

    # -- inside --

    def _answers(self, number: int) -> Iterator[None]:
        self._read, self._rids, self._instead = {}, set(), None
        yield
        found: dict[str, list[Any]] = {}
        # A part of a condition may be read only where another is not true.
        while new := {text: self._others(text) for text in self._read if text not in found}:
            found |= new
            alone = ({text: other} for text, several in new.items() for other in several)
            # Where one part of a condition is enough, no other answer alone makes it fail.
            most = max(map(len, found.values()))
            at_once = (
                {text: several[n % len(several)] for text, several in found.items() if several} for n in range(most)
            )
            for instead in itertools.chain(alone, at_once):
                if number in self._settled:
                    return
                self._instead = instead
                yield

    def _others(self, text: str) -> list[Any]:
        """What might have been answered to this: the answers to others too, and the rids that the client chose."""
        value = self._read[text]
        rids = sorted(self._rids)
        named: list[Any] = rids if type(value) is str else []
        if isinstance(value, (tuple, list)):
            named = [type(value)([rid]) for rid in rids]
        same = [other for other in self._read.values() if type(other) is type(value) and other is not value]
        return [*others(value), *named, *same]

    def _answer(self, text: str, value: Any) -> Any:
        if not isinstance(value, _PLAIN):
            return value
        self._read.setdefault(text, value)
        return value if self._instead is None else self._instead.get(text, value)

    @staticmethod
    def _known(value: Any) -> Any:
        if not isinstance(value, _PLAIN):
            raise _NotKnownError
        return value


def others(value: Any) -> Iterator[Any]:
    """What might have been answered instead: values of the same kind, and None for a text or an element."""
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, Status):
        yield from (Status(one) for one in (HTTPStatus.OK, HTTPStatus.BAD_REQUEST) if one != int(value))
    elif isinstance(value, Word):
        yield from value.others()
    elif isinstance(value, enum.Enum):
        yield from (one for one in type(value) if one is not value)
    elif isinstance(value, (int, float)):
        yield from {0, value + 1, max(0, value - 1), value + _MANY} - {value}
    elif isinstance(value, str):
        yield from ("", f"{value} {_OTHER}", None)
    elif value is None:
        yield from (_OTHER, 7)
    elif isinstance(value, (tuple, list)):
        yield from _other_sequences(value)
    elif isinstance(value, (set, frozenset)):
        yield from map(type(value), _other_sequences(list(value)))
    elif isinstance(value, dict):
        yield from _other_mappings(value)


def _other_sequences(value: Any) -> Iterator[Any]:
    made = type(value)
    if not value:
        yield from (made([_OTHER]), made([_OTHER] * _MANY_ELEMENTS))
        return
    yield from (made(()), made([*value, value[-1]]), made(value[:-1]), made([*value] * _MANY_ELEMENTS))
    yield from (made([other, *value[1:]]) for other in (*others(value[0]), None))
    yield from (made([*value[:-1], other]) for other in (*others(value[-1]), None))


def _other_mappings(value: dict[Any, Any]) -> Iterator[Any]:
    if isinstance(value, Named):
        changed = ({name: other} for name, one in value.items() for other in others(one))
    else:
        yield {} if value else {_OTHER: 1}
        changed = ({name: other} for name, one in list(value.items())[:_MOST_ASKED] for other in others(one))
    for change in changed:
        instead = copy.copy(value)
        instead.update(change)
        yield instead


class Variables(ast.NodeVisitor):
    """Which variables of a function are made of constants alone: each bound once, by a statement of its own.

    ``made`` are all that it binds, those of the functions in it included.
    """

    def __init__(self, function: ast.AST) -> None:
        self.made: set[str] = set()
        self.constant: set[str] = set()
        self._function = function
        self._plain: dict[str, ast.expr | ast.FunctionDef] = {}
        self._changed: set[str] = set()
        self.visit(function)
        self.made |= self._plain.keys()
        left = {name: made for name, made in self._plain.items() if name not in self._changed}
        while True:
            found = {name for name, made in left.items() if name not in self.constant and self._is_constant(made)}
            if not found:
                return
            self.constant |= found

    def _is_constant(self, made: ast.expr | ast.FunctionDef) -> bool:
        """Whether nothing of it comes from an answer, from another's call, or from what the module has."""
        own = {node.arg for node in ast.walk(made) if isinstance(node, ast.arg)}
        for node in ast.walk(made):
            if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.Attribute, ast.NamedExpr)):
                return False
            if isinstance(node, ast.Name) and node.id not in own | self.constant | _HARMLESS:
                return False
        return True

    def visit_Name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.made.add(node.id)
            self._changed.add(node.id)

    def visit_arg(self, node: ast.arg) -> None:
        self.made.add(node.arg)
        self._changed.add(node.arg)

    def visit_ExceptHandler(self, node: ast.ExceptHandler) -> None:
        self._changed |= {node.name} if node.name else set()
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """A method may change what it is called on."""
        if isinstance(node.value, ast.Name):
            self._changed.add(node.value.id)
        self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> None:
        if isinstance(node.value, ast.Name) and not isinstance(node.ctx, ast.Load):
            self._changed.add(node.value.id)
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if len(node.targets) == 1 and isinstance(target, ast.Name) and self._is_plain(node, target.id):
            self._plain[target.id] = node.value
            self.visit(node.value)
        else:
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if self._is_plain(node, node.name):
            self._plain[node.name] = node
        elif node is not self._function:
            self.made.add(node.name)
            self._changed.add(node.name)
        self.generic_visit(node)

    def _is_plain(self, node: ast.stmt, name: str) -> bool:
        return node in getattr(self._function, "body", ()) and name not in self._plain


def doubted(assertion: ast.Assert, number: int, variables: Variables, hook: Callable[..., ast.Call]) -> list[ast.stmt]:
    """The statements that ask an assertion again; none for one that would act by being asked."""
    test = copy.deepcopy(assertion.test)
    for node in ast.walk(test):
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr)):
            return []
        if isinstance(node, ast.Name) and node.id in _ACTING:
            return []
    answers = _Answers(variables, test, hook)
    if not all(answers.is_known(node) for node in ast.walk(test) if isinstance(node, ast.Call)):
        return []
    whole = hook("doubt.truth", ast.Constant(test.id), test) if isinstance(test, ast.Name) else answers.visit(test)
    asked = ast.Expr(hook("doubt.answered", number, whole))
    failing = ast.ExceptHandler(ast.Attribute(hook("doubt").func, "failure", ast.Load()), None, [])
    failing.body = [ast.Expr(hook("doubt.failed", number))]
    again = ast.While(hook("doubt.doubts", number), [ast.Try([asked], [failing], [], [])], [])
    for node in ast.walk(again):
        if not hasattr(node, "lineno"):
            ast.copy_location(node, assertion)
    return [again]


class _Answers(ast.NodeTransformer):
    """Puts a hook around each answer that a condition reads."""

    def __init__(self, variables: Variables, test: ast.expr, hook: Callable[..., ast.Call]) -> None:
        self._variables, self._hook = variables, hook
        # What the condition itself binds: the targets of its comprehensions and the arguments of its lambdas.
        self._bound = {node.id for node in ast.walk(test) if isinstance(node, ast.Name) and _binds(node)}
        self._bound |= {node.arg for node in ast.walk(test) if isinstance(node, ast.arg)}

    def is_known(self, call: ast.Call) -> bool:
        """Whether what a call says depends on nothing but the answers that it is given."""
        if isinstance(call.func, ast.Name):
            if call.func.id in _BUILTIN and call.func.id not in self._variables.made:
                return True
            if call.func.id in self._variables.made - self._variables.constant:
                return False
        elif not isinstance(call.func, ast.Attribute):
            return False
        elif self._reads_answers(call.func):
            return True
        return any(map(self._reads_answers, [*call.args, *(one.value for one in call.keywords)]))

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        return self._attribute(node, "look") if self._reads_answers(node) else node

    def visit_Call(self, node: ast.Call) -> Any:
        text, is_of_answers = ast.unparse(node), self._reads_answers(node.func)
        node.args = [self.visit(one) for one in node.args]
        node.keywords = [self.visit(one) for one in node.keywords]
        if isinstance(node.func, ast.Attribute) and is_of_answers:
            owner = self._owner(node.func.value)
            node.func = self._hook("doubt.ask", ast.Constant(text), owner, ast.Constant(node.func.attr))
            return self._hook("doubt.known", node)
        return node

    def visit_Name(self, node: ast.Name) -> Any:
        if not isinstance(node.ctx, ast.Load) or node.id in self._variables.constant:
            return node
        if node.id in self._bound:
            return self._hook("doubt.known", node)
        if self._is_answer(node.id):
            return self._hook("doubt.local", ast.Constant(node.id), node)
        return node if node.id in _BUILTIN else self._hook("doubt.constant", node)

    def _attribute(self, node: ast.Attribute, hook: str) -> ast.expr:
        text = ast.Constant(ast.unparse(node))
        return self._hook(f"doubt.{hook}", text, self._owner(node.value), ast.Constant(node.attr))

    def _owner(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Name):
            is_read = self._is_answer(node.id) and node.id not in self._bound
            return self._hook("doubt.owner", ast.Constant(node.id), node) if is_read else node
        if isinstance(node, ast.Attribute):
            return self._attribute(node, "part")
        visited: Any = self.visit(node)
        is_known = isinstance(node, ast.Call) and isinstance(visited, ast.Call) and visited is not node
        return visited.args[0] if is_known else visited  # type: ignore[no-any-return]

    def _reads_answers(self, node: ast.expr) -> bool:
        return any(isinstance(one, ast.Name) and self._is_answer(one.id) for one in ast.walk(node))

    def _is_answer(self, name: str) -> bool:
        return name in self._bound or name in self._variables.made - self._variables.constant


def _binds(node: ast.Name) -> bool:
    return not isinstance(node.ctx, ast.Load)
