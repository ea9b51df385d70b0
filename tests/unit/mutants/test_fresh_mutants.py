"""Fresh mutants are edits of the source by the operators of mutation testing, drawn always alike, found by name."""

from __future__ import annotations

import ast
import textwrap

import pytest
from scripted_lockstep.mutants import fresh, mutant_named
from scripted_lockstep.mutants.fresh import fresh_mutant, fresh_sample

from engine.core.scheduler.books import Books
from scripted.core.refusals import ScriptDefinitionError

SOURCE = textwrap.dedent('''
    def drained(self, most: int = 3) -> None:
        """Not this: 1 < 2."""
        assert self.left >= 0, f"{self.left + 1} left"
        while not self.done and self.left < most:
            self.left -= 1
            if self.left is None:
                raise ValueError("negative: " + str(1 + 2))
        self.tell(len(self.text))
''')


def becomes(text: str) -> list[str]:
    function = ast.parse(text).body[0]
    assert isinstance(function, ast.FunctionDef)
    return [mutant.bug.partition(": ")[2] for mutant in fresh._of_function("m", "drained", function, text)]


def test_operators_edit_what_runs_and_no_texts() -> None:
    said = becomes(SOURCE)
    for edit in (
        "not self.done and self.left < most -> (not self.done or self.left < most)",
        "not self.done and self.left < most -> (not (not self.done and self.left < most))",
        "not self.done -> (self.done)",
        "self.left < most -> (self.left <= most)",
        "self.left -= 1 -> pass",
        "1 -> (0)",
        "1 -> (2)",
        "self.left is None -> (self.left is not None)",
        "raise ValueError('negative: ' + str(1 + 2)) -> pass",
        "self.tell(len(self.text)) -> pass",
        "self.tell(len(self.text)) -> return",
    ):
        assert said.count(edit) == 1, edit
    # A docstring, an assertion, what an error says and a default of a parameter are left alone.
    assert len(said) == 13


def test_a_sample_is_always_the_same_and_each_of_it_is_on_by_name() -> None:
    sample = fresh_sample(5, 27)
    assert list(fresh_sample(8, 27))[:5] == list(sample) != list(fresh_sample(5, 28))
    for name, change in sample.items():
        mutant = mutant_named(name)
        assert (mutant.name, mutant.bug) == (name, change)
        function = mutant.function
        healthy = function.__code__
        with mutant.switched_on():
            assert function.__code__ != healthy
        assert function.__code__ is healthy


def test_an_edit_changes_what_it_says() -> None:
    (mutant,) = [
        one
        for path, mutants in fresh._mutants_of("scheduler.books")
        for one in mutants
        if path == "Books.is_fully_idle" and one.bug.endswith("-> (self.waiting)")
    ]
    assert Books().is_fully_idle
    with mutant.switched_on():
        assert not Books().is_fully_idle
    assert Books().is_fully_idle


@pytest.mark.parametrize("name", ["fresh:books.x", "fresh:scheduler.books.Books.land.99", "fresh:scheduler.no.f.0"])
def test_a_name_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ScriptDefinitionError, match="counts the edits of one function"):
        fresh_mutant(name)


def test_another_name_is_none_of_these() -> None:
    assert fresh_mutant("flush-ignores-in-flight") is None
