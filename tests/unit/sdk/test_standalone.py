"""Findings as tests of a scheduler's own classes: what is not kept, and who writes none."""

from __future__ import annotations

import ast
from http import HTTPStatus
from typing import Any

import pytest

from scripted import api
from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.standalone import Calls, Standalone, _needed, _Part, what_is_wrong

EXAMPLE = "adapter=examples/your_scheduler/adapter.py"


@pytest.mark.parametrize(
    ("body", "is_kept"),
    [("assert not 1, 'it waits'", True), ("assert 1", False), ("raise_nothing", False), ("import scripted", False)],
)
def test_a_file_is_kept_if_it_fails_as_it_says_and_alone(body: str, is_kept: bool) -> None:
    wrong = what_is_wrong(f"def test_it():\n    {body}\n", "AssertionError: ")
    assert (wrong is None) == is_kept


@pytest.mark.parametrize(
    ("schedule", "mutant", "words"),
    [
        ("default; 1 start a prompt=4", None, "lockstep writes no standalone tests; leave --standalone out"),
        ("default; 1 start a prompt=4", "abc", "a standalone test knows no mutant: leave --mutant abc"),
        (f"{EXAMPLE}; 1 start a prompt=4", None, "writes no standalone tests, for it has no standalone="),
    ],
)
def test_who_writes_none_says_why(schedule: str, mutant: str | None, words: str) -> None:
    with pytest.raises(ScriptDefinitionError, match=words):
        api.write_test(schedule, mutant=mutant, standalone=True)


class _Engine(Standalone[Any, Any]):
    engine = "an engine"

    def modules(self, config: Any) -> tuple[()]:
        return ()

    def opening(self, config: Any) -> tuple[()]:
        return ()

    def watched(self, machine: Any) -> dict[str, Any]:
        return {}

    def spelled(self, value: object, calls: Calls, arguments: Any) -> None:
        return None

    def remark(self, plan: Any) -> str:
        return ""


def test_the_class_of_an_argument_is_imported_though_the_adapter_never_names_it() -> None:
    calls = Calls(_Engine())
    assert calls.spell([HTTPStatus.GONE]) == "[HTTPStatus.GONE]"
    assert [ast.unparse(node) for node in calls.imports] == ["from http import HTTPStatus"]


def test_a_file_has_only_the_definitions_that_it_uses() -> None:
    """Also those that a used one needs."""
    parts = [
        _Part({"outer"}, ["def outer(): return inner()"]),
        _Part({"unused"}, ["def unused(): return outer()"]),
        _Part({"inner"}, ["def inner(): return 1"]),
    ]
    assert _needed(parts, "assert outer()") == ["def outer(): return inner()", "def inner(): return 1"]
