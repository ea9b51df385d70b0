"""Operators of the mutation score: what is changed in a file, what is left out, and that each change is really made."""

import ast

import pytest

from tools.mutation.operators import MODULE, mutants_of, mutated

SOURCE = '''
"""A docstring."""

from __future__ import annotations

__all__ = ["Box"]

LIMIT = 3


class Box:
    """It has 2 of something."""

    size: int = 4

    def __repr__(self) -> str:
        return "Box" + "!"

    @property
    def room(self) -> int:
        return LIMIT - self.size

    def put(self, count: int = 1, *, kept: bool = False) -> bool:
        assert count > 0, f"{count + 1} is not enough"
        if count > 9:
            raise ValueError(f"{count} > {9 + 0}")
        if self.size and not kept:
            self.size += count
            self.log()
            self._check_all(3)
        return self.size <= LIMIT

    def check_room(self) -> None:
        self.seen = min(self.size, 8)

    def pairs(self) -> list:
        return list(zip(self.a, self.b, strict=True))
'''


def found(**wanted):
    return [one for one in mutants_of("box.py", SOURCE) if all(getattr(one, k) == v for k, v in wanted.items())]


def said(**wanted):
    return {f"{one.before} -> {one.after}" for one in found(**wanted)}


def test_every_operator_has_its_changes():
    assert said(operator="compare", function="Box.put", guard=False) == {"<= -> <", "<= -> >"}
    assert said(operator="boolean") == {"and -> or"}
    assert said(operator="arithmetic") == {"- -> +", "+ -> -"}
    assert said(operator="call") == {"min -> max"}
    assert {"LIMIT - self.size -> None", "self.size <= LIMIT -> None"} <= said(operator="return")
    assert "kept -> not kept" in said(operator="negate")
    assert said(operator="remove", guard=False) == {"self.size += count -> pass", "self.log() -> pass"}


def test_numbers_of_the_module_and_defaults_are_changed():
    assert said(function=MODULE) == {"3 -> 4", "3 -> 2"}
    assert {"1 -> 2", "1 -> 0", "False -> True"} <= said(operator="constant", function="Box.put")


def test_texts_class_bodies_and_what_is_raised_are_left_out():
    lines = SOURCE.splitlines()
    touched = {lines[one.line - 1].strip() for one in found()}
    assert not {line for line in touched if line.startswith(('"""', "__all__", "size: int", "raise", 'return "Box"'))}
    assert not [one for one in found(operator="arithmetic") if "is not enough" in lines[one.line - 1]]


def test_what_only_objects_is_marked_as_a_guard():
    assert said(operator="compare", guard=True) == {"> -> >=", "> -> <="}
    assert {one.function for one in found(guard=True)} == {"Box.put", "Box.check_room", "Box.pairs"}
    assert [one.before for one in found(guard=True, function="Box.pairs")] == ["True"]
    assert "self._check_all(3)" in {one.before for one in found(operator="remove", guard=True)}
    assert any(one.before.startswith("assert") for one in found(operator="remove", guard=True))
    assert all(one.guard for one in mutants_of("engine/integrity/memory.py", SOURCE))


def test_ids_are_unique_and_every_mutant_is_another_program():
    mutants = found()
    assert len({one.id for one in mutants}) == len(mutants)
    programs = {ast.unparse(mutated(SOURCE, one)) for one in mutants}
    # Two ways to write one program: a comparison that is negated, and an operand of it.
    assert len(mutants) - 2 <= len(programs) <= len(mutants)
    assert ast.unparse(ast.parse(SOURCE)) not in programs


def test_a_mutant_of_another_source_is_refused():
    mutant = found(operator="boolean")[0]
    with pytest.raises(AssertionError, match="the source has changed"):
        mutated("\n" + SOURCE, mutant)


def test_lines_are_those_of_the_statement_without_its_body():
    (mutant,) = found(operator="boolean")
    assert (mutant.first_line, mutant.last_line) == (mutant.line, mutant.line)
    default = found(operator="constant", before="False")[0]
    assert default.first_line == default.last_line == default.line
