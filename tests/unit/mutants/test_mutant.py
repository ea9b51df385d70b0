"""A mutant is one cut in the source of a function of any kind, taken back afterwards; one that does not fit says so."""

from __future__ import annotations

import contextlib
import traceback
from contextlib import AbstractContextManager
from typing import Any

import pytest

from scripted.core.edits import EditDoesNotFit
from scripted.core.mutant import Mutant, read_mutants
from scripted.core.refusals import ScriptDefinitionError
from tests.unit.mutants import cut_here
from tests.unit.mutants.cut_here import Kinds, add_two, down

HERE = "tests.unit.mutants.cut_here"


def mutant(place: str, cut: str = "", becomes: str = "", replacement: Any = None) -> Mutant:
    return Mutant(
        name="cut",
        origin="a test",
        bug="a bug",
        signature="",
        test="",
        target=f"{HERE}:{place}",
        cut=cut,
        becomes=becomes,
        replacement=replacement,
    )


def _open(kinds: Kinds) -> int:
    with kinds.opened() as number:
        return number


@pytest.mark.parametrize(
    ("place", "cut", "becomes", "call", "healthy", "broken"),
    [
        ("Kinds.name", '"!"', '"?"', lambda: Kinds().name(), "base!", "base?"),
        ("Kinds.private", " + len", " - len", lambda: Kinds().private(), 6, -4),
        ("Kinds.size", "1", "2", lambda: Kinds().size, 1, 2),
        ("Kinds.once", "1", "2", lambda: Kinds().once, 1, 2),
        ("Kinds.fixed", "return number", "return -number", lambda: Kinds.fixed(), 2, -2),
        ("Kinds.made", "cls.__name__", "cls.__name__.lower()", lambda: Kinds.made(), "Kinds", "kinds"),
        ("Kinds.opened", "yield 1", "yield 2", lambda: _open(Kinds()), 1, 2),
        ("Kinds.numbers", "range(3)", "range(2)", lambda: list(Kinds().numbers()), [0, 1, 2], [0, 1]),
        ("down", "[number, *", "[*", lambda: down(2), [2, 1], []),
        ("add_two", "number + step", "number - step", lambda: add_two(5), 7, 3),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_cut_in_a_function_of_each_kind(
    place: str, cut: str, becomes: str, call: Any, healthy: object, broken: object
) -> None:
    """Also where the function was imported by name before, as ``down`` and ``add_two`` are here."""
    assert call() == healthy
    with contextlib.suppress(RuntimeError), mutant(place, cut, becomes).switched_on():
        assert call() == broken
        raise RuntimeError
    assert call() == healthy


@pytest.mark.parametrize(
    ("cut", "becomes"),
    [
        (
            "            total = first\n            total += second\n",
            "            total = first\n            total -= second\n",
        ),
        ("total = first\n        total += second", "total = first - second"),
        ("\ttotal += second", "\ttotal -= second"),
    ],
)
def test_a_cut_is_found_whatever_its_indentation(cut: str, becomes: str) -> None:
    with (
        mutant("Kinds.raises", cut, becomes).switched_on(),
        pytest.raises(AssertionError, match="a line below the cut"),
    ):
        Kinds().raises(1, 2)


def test_indented_lines_stay_below_the_block_above_them() -> None:
    with mutant("Kinds.positive", "return number", "    number += 1\n    return number").switched_on():
        assert (Kinds().positive(2), Kinds().positive(-2)) == (3, 0)


def test_a_cut_that_is_not_there_is_refused_with_the_nearest_lines() -> None:
    with pytest.raises(EditDoesNotFit, match=r"0 times; the nearest lines are 'total \+= second'"):
        mutant("Kinds.raises", "total += seconds", "pass").switched_on().__enter__()


def _last_line_of(switch: AbstractContextManager[None]) -> traceback.FrameSummary:
    with switch, pytest.raises(AssertionError, match="a line below the cut") as caught:
        Kinds().raises(1, 1)
    return traceback.extract_tb(caught.value.__traceback__)[-1]


@pytest.mark.parametrize("becomes", ["total -= second", "total += 1\n    total += second\n    total += 1", ""])
def test_lines_below_a_cut_are_those_of_the_file(becomes: str) -> None:
    cut = "total += second" if becomes else "total = first\n    total += second"
    how = mutant("Kinds.raises", cut, becomes or "total = -first")
    healthy, broken = (_last_line_of(switch) for switch in (contextlib.nullcontext(), how.switched_on()))
    assert (broken.lineno, broken.line, broken.filename) == (healthy.lineno, healthy.line, healthy.filename)


@pytest.mark.parametrize(
    ("place", "cut", "becomes", "why"),
    [
        ("Kinds.gone", "x", "y", "there is no tests.unit.mutants.cut_here:Kinds.gone"),
        ("Kinds.size", "return 3", "y", r"must have 'return 3' exactly once, but the function has it 0 times"),
        ("Kinds.raises", "total", "y", r"must have 'total' exactly once, but the function has it 4 times"),
        ("Kinds.fixed", "number: int = 2", "number: int = 3", "once, but .* 1 times, in line 2, before its body"),
        ("Kinds.size", "return 1", "return (", r"cannot be compiled with 'return \('"),
        ("add_two", "number + step", "number", r"it used \('step',\), and now \(\)"),
        ("Kinds.name", '"!"', "str(sorted(_UNKNOWN))", "cut_here has no name '_UNKNOWN', which"),
        ("thrice", "3", "4", "must be a function defined by `def`"),
        ("HERE", "3", "4", "there is no"),
    ],
)
def test_a_mutant_that_does_not_fit_says_which_and_where(place: str, cut: str, becomes: str, why: str) -> None:
    before = dict(vars(cut_here)), dict(vars(Kinds))
    with pytest.raises(EditDoesNotFit, match=f"the mutant cut does not fit: .*{why}"):
        mutant(place, cut, becomes).switched_on().__enter__()
    assert (dict(vars(cut_here)), dict(vars(Kinds))) == before


def test_an_attribute_that_is_inherited_is_replaced_and_comes_back() -> None:
    with mutant("Kinds.name", replacement=lambda _: "other").switched_on():
        assert Kinds().name() == "other"
    assert Kinds().name() == "base!"


def test_a_mutant_is_either_a_cut_or_a_replacement() -> None:
    with pytest.raises(ScriptDefinitionError, match="must have either a cut or a replacement"):
        mutant("down")
    with pytest.raises(ScriptDefinitionError, match="must have either a cut or a replacement"):
        mutant("down", "x", "y", replacement=1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[[mutants]]\nname = "cut"\n', r"bugs\.toml has tables \[every\] and \[\[mutant\]\] alone, got \['mutants'\]"),
        ('[[mutant]]\nname = "cut"\nfile = "engine"\n', r"bugs\.toml: the mutant cut must have the fields.*'file'"),
        ('[[mutant]]\nname = "cut"\ncut = "a"\n', r"bugs\.toml: the mutant cut must have the fields.*'target'"),
        ('name = "cut', r"bugs\.toml is no TOML"),
    ],
)
def test_a_file_of_mutants_that_cannot_be_read_says_why(tmp_path, text, what):
    file = tmp_path / "bugs.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ScriptDefinitionError, match=what):
        read_mutants(file)


def test_what_all_mutants_of_a_file_share_stands_once(tmp_path):
    file = tmp_path / "bugs.toml"
    shared = '[every]\norigin = "a test"\nbug = "a bug"\nsignature = ""\ntest = "here"\n'
    both = f'target = "{HERE}:add_two"\ncut = "number"\n'
    file.write_text(f'{shared}[[mutant]]\nname = "one"\n{both}[[mutant]]\nname = "two"\ntest = "there"\n{both}')
    assert [(one.name, one.origin, one.test) for one in read_mutants(file)] == [
        ("one", "a test", "here"),
        ("two", "a test", "there"),
    ]


def test_two_edits_of_one_function_meet_and_are_undone_in_turn() -> None:
    first = mutant("Kinds.raises", "total += second", "total -= second\n    total -= 1")
    second = mutant("Kinds.raises", "= first", "= 10")
    with first.switched_on(), second.switched_on():
        with pytest.raises(AssertionError, match="a line below the cut") as caught:
            Kinds().raises(1, 1)
        line = traceback.extract_tb(caught.value.__traceback__)[-1]
        assert caught.traceback[-1].locals["total"] == 8
    with pytest.raises(AssertionError, match="a line below the cut") as healthy:
        Kinds().raises(1, 1)
    assert line.lineno == traceback.extract_tb(healthy.value.__traceback__)[-1].lineno
    assert healthy.traceback[-1].locals["total"] == 2
