"""Reads a test file's syntax tree for its tests and its engine configurations.

Never imports the file. Commands find node ids by test name; files with equal configurations share servers.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from ci.registration import dotted_name


@dataclass(frozen=True)
class DefinedTests:
    """Test functions at the top level, `Class::method` names, classes, and names defined twice with their line.

    `others` are the other names at the top level, such as a schedule or a script that is not a test.
    """

    top_level: tuple[str, ...]
    methods: tuple[str, ...]
    classes: tuple[str, ...]
    shadowed: tuple[tuple[str, int], ...]
    others: tuple[str, ...] = ()

    def defines(self, node: str) -> bool:
        """Whether `Class`, `Class::method` or `function` is defined here; parameters in brackets do not count."""
        bare = node.partition("[")[0]
        return bare in self.top_level or bare in self.methods or bare in self.classes


def defined_tests(tree: ast.Module) -> DefinedTests:
    """Collect by pytest's default names: functions `test*`, classes `Test*` with methods `test*`."""
    functions = list(_test_functions(tree.body))
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name.startswith("Test")]
    methods = [(f"{node.name}::{name}", line) for node in classes for name, line in _test_functions(node.body)]
    return DefinedTests(
        top_level=tuple(dict.fromkeys(name for name, _ in functions)),
        methods=tuple(dict.fromkeys(name for name, _ in methods)),
        classes=tuple(node.name for node in classes),
        shadowed=tuple(_repeated([*functions, *methods])),
        others=tuple(dict.fromkeys(_values(tree.body))),
    )


def engine_key(tree: ast.Module) -> str:
    """Return the text of all engine configurations in the file's `@scripted(...)` tests, or an empty string.

    Equal texts mean that one server can serve both files; different texts only cost a boot.
    """
    assigned = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    arguments = [
        assigned.get(argument.id, argument) if isinstance(argument, ast.Name) else argument
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for argument in _scripted_arguments(node)
    ]
    # Each once: several names may share a value, and several tests a name.
    once = {id(argument): argument for argument in arguments}
    return " | ".join(sorted({ast.unparse(argument) for argument in once.values()}))


def _test_functions(body: Iterable[ast.stmt]) -> Iterator[tuple[str, int]]:
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield node.name, node.lineno
        elif isinstance(node, ast.Assign):  # A test made by a call: test_x = scripted(CONFIG)(program).
            for target in node.targets:
                if isinstance(target, ast.Name) and target.id.startswith("test_"):
                    yield target.id, node.lineno


def _values(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("test"):
            yield node.name
        yield from (target.id for target in _targets(node) if isinstance(target, ast.Name))


def _targets(node: ast.stmt) -> list[ast.expr]:
    if isinstance(node, ast.Assign):
        return node.targets
    return [node.target] if isinstance(node, ast.AnnAssign) else []


def _repeated(names: list[tuple[str, int]]) -> Iterator[tuple[str, int]]:
    seen: set[str] = set()
    for name, line in names:
        if name in seen:
            yield name, line
        seen.add(name)


def _scripted_arguments(function: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[ast.expr]:
    for decorator in function.decorator_list:
        if not isinstance(decorator, ast.Call) or not decorator.args:
            continue
        if dotted_name(decorator.func).rpartition(".")[2] == "scripted":
            yield decorator.args[0]
