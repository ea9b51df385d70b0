"""The gallery's table: complete, findable, and taken back after use."""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import inspect
from pathlib import Path

import pytest
from every_case import every_case
from scripted_lockstep.mutants import (
    CONTRACTS,
    KEPT_NUMBERS,
    MUTANTS,
    PAIRS,
    RACES,
    RECENT,
    UnknownMutant,
    mutant_named,
)
from scripted_lockstep.mutants.gallery import switched_on

from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import read_mutants
from scripted.core.schedule import Schedule
from scripted.search.execution import execute

ROOT = Path(__file__).parents[3]


def test_a_misspelt_name_is_answered_with_the_nearest():
    with pytest.raises(UnknownMutant, match="did you mean 'abort-matches-by-prefix'"):
        mutant_named("abort-matches-by-prefixes")


def test_a_name_like_nothing_is_answered_with_the_command_that_lists_them():
    with pytest.raises(UnknownMutant, match=r"'0123456789'; `scripted gallery list` shows them"):
        mutant_named("0123456789")


@every_case("mutant", [*MUTANTS, *CONTRACTS])
def test_a_mutant_is_in_the_engine_only_while_it_is_switched_on(mutant):
    before = _what_runs(mutant)
    with contextlib.suppress(RuntimeError), mutant.switched_on():
        assert _what_runs(mutant) != before
        raise RuntimeError
    assert _what_runs(mutant) == before


@every_case("mutant", [*MUTANTS, *CONTRACTS])
def test_a_mutant_names_a_test_that_exists(mutant):
    file, _, name = mutant.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    assert mutant.name in (ast.get_docstring(tree) or "")
    assert mutant.bug
    assert mutant.origin
    assert mutant.signature
    assert adapter_named(mutant.adapter or DEFAULT_ADAPTER).workloads


def test_the_races_of_the_gallery_are_there():
    """G07 needs a weight update, which the engine does not offer; G27 lives in the live gate, which no script runs."""
    origins = {mutant.origin.partition(":")[0] for mutant in RACES}
    assert {f"G{number:02}" for number in range(1, 29) if number not in (7, 27)} <= origins


def test_every_file_of_mutants_is_in_the_table():
    files = sorted((ROOT / "adapters/scripted_lockstep/mutants").glob("*.toml"))
    assert files
    assert {one.name for file in files for one in read_mutants(file)} == {
        one.name for one in (*MUTANTS, *CONTRACTS, *PAIRS, *KEPT_NUMBERS, *RECENT)
    }


def _what_runs(mutant):
    """The code of a function, or the value of anything else, at a mutant's target."""
    module, _, path = mutant.target.partition(":")
    *owners, attribute = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    found = inspect.getattr_static(owner, attribute)
    found = getattr(found, "fget", found)
    return getattr(found, "__code__", found)


def test_what_the_checks_remember_is_forgotten_with_a_mutant() -> None:
    """Keys of pages that a mutant made are not compared with those of the healthy engine afterwards."""
    schedule = Schedule.parse("page_size=4 kv_events=True; 1 start a prompt=11 new=4 seed=77 salt=u")
    with switched_on("the-second-tier-knows-no-salt"):
        execute(schedule)
    assert execute(schedule).failure is None
