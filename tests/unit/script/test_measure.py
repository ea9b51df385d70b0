"""The counts of a script's assertions: run, failed and caught, never reached."""

from __future__ import annotations

import ast
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripted.core.errors import BadCall
from scripted.script.counted_source import negated
from scripted.script.measure import Measured, count_assertions, negate

SOURCE = """
import ast
import types

import {helpers} as helpers

def asks(values):
    assert all(value > 0 for value in values)
    if not values:
        assert not values, "never"

def catches():
    try:
        assert 1 > 2
    except AssertionError:
        pass

def makes():
    kept = {{"one": steps()}}
    return kept

def steps():
    yield

def names(call):
    later = inner
    if call:
        helpers.check(3)

def inner():
    assert 1

def fails():
    assert [1, 2] == [1, 3]

class Checks:
    def first(self):
        assert self

def uses_a_class(call):
    checks = Checks()
    if call:
        checks.first()

def matches(value):
    match value:
        case types.SimpleNamespace(kind=ast.Add) | {{ast.x: _}} if value.kind is ast.Add:
            assert value.kind is ast.Add
"""
HELPERS = """
def check(value):
    assert value == 3
"""


@pytest.fixture
def module(tmp_path: Path) -> Iterator[Any]:
    names = [f"helpers_{tmp_path.name}", f"measured_{tmp_path.name}"]
    for name, source in zip(names, (HELPERS, SOURCE.format(helpers=names[0])), strict=True):
        path = tmp_path / f"{name}.py"
        path.write_text(source)
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = made = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(made)
    yield made
    for name in names:
        sys.modules.pop(name)


def _measured(function: Callable[..., Any], *arguments: Any) -> Measured:
    asked = Measured(function)
    with asked:
        function(*arguments)
    return asked


def _never(asked: Measured) -> list[str]:
    return [site.rpartition("assert ")[2] for site, count in asked.own_sites().items() if not count]


def test_an_assertion_counts_as_often_as_it_ran(module: types.ModuleType) -> None:
    asked = Measured(module.asks)
    with asked:
        module.asks([1])
        module.asks([2])
    assert list(asked.own_sites().values()) == [2, 0]
    assert asked.loose_ends() == {}
    module.asks([3])
    assert asked.assertions == 2


def test_all_of_nothing_is_a_loose_end(module: types.ModuleType) -> None:
    assert _measured(module.asks, []).loose_ends() == {"assertions on all elements of nothing": 1}


def test_an_assertion_that_is_caught_is_a_loose_end(module: types.ModuleType) -> None:
    assert _measured(module.catches).loose_ends() == {"assertions that failed and were caught": 1}


def test_a_generator_that_never_runs_is_refused_by_name(module: types.ModuleType) -> None:
    asked = Measured(module.makes)
    with asked:
        kept = module.makes()
    with pytest.raises(BadCall, match=r"steps\(\.\.\.\) was made there and never ran"):
        asked.check_made()
    next(kept["one"])
    asked.check_made()


@pytest.mark.parametrize(("call", "never"), [(False, ["1", "value == 3"]), (True, ["1"])])
def test_helpers_that_are_named_and_never_called(module: types.ModuleType, call: bool, never: list[str]) -> None:
    assert sorted(_never(_measured(module.names, call))) == never


@pytest.mark.parametrize(("call", "never"), [(False, ["self"]), (True, [])])
def test_checks_of_a_class_that_is_named(module: types.ModuleType, call: bool, never: list[str]) -> None:
    assert _never(_measured(module.uses_a_class, call)) == never


def test_counted_assertions_are_introspected(module: types.ModuleType) -> None:
    assert count_assertions(module.fails)
    with pytest.raises(AssertionError, match="At index 1 diff: 2 != 3"):
        module.fails()


def test_one_assertion_is_negated(module: types.ModuleType) -> None:
    assert count_assertions(module.asks, negatable=True)
    (site,) = [one for one in _measured(module.asks, [1]).executed if "all" in one.text]
    module.asks([1])
    with negate(site), pytest.raises(AssertionError):
        module.asks([1])
    with negate(site):
        module.asks([-1])
    with pytest.raises(AssertionError):
        module.asks([-1])


def test_patterns_are_left_alone(module: types.ModuleType) -> None:
    """Such a file could not be compiled with counters."""
    assert count_assertions(module.matches, negatable=True)
    assert _measured(module.matches, types.SimpleNamespace(kind=ast.Add)).assertions == 1


@pytest.mark.parametrize(
    ("condition", "other"),
    [
        ("a == b", "a != b"),
        ("a < b", "a >= b"),
        ("a is None", "a is not None"),
        ("a in b", "a not in b"),
        ("a and b", "not a or not b"),
        ("not a", "a"),
        ("all(a > 1 for a in b)", "all((a <= 1 for a in b))"),
        ("not any(a > 1 for a in b)", "not any((a <= 1 for a in b))"),
        ("f(a)", "not f(a)"),
        ("a < b < c", "not a < b < c"),
    ],
)
def test_the_other_way_round(condition: str, other: str) -> None:
    assert ast.unparse(negated(ast.parse(condition, mode="eval").body)) == other
