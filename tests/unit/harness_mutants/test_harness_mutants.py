"""Each check of the harness is broken on purpose, and noticed."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import promises
import pytest
from thinned import thinned

from scripted.core.mutant import Mutant, read_mutants

MUTANTS = read_mutants(Path(__file__).with_name("mutants.toml"))


_NO_CHECK = inspect.CO_GENERATOR | inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


@functools.cache
def _hold(name: str) -> None:
    """The promises hold as long as nothing is broken."""
    getattr(promises, name)()


@pytest.mark.parametrize("mutant", thinned(MUTANTS, one_in=2), ids=lambda mutant: mutant.name)
def test_a_broken_harness_is_noticed(mutant: Mutant) -> None:
    """46.13: by the quickest check that can."""
    _hold(mutant.test)
    with mutant.switched_on(), pytest.raises((Exception, pytest.fail.Exception)):
        getattr(promises, mutant.test)()


def test_every_part_is_broken() -> None:
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.test for mutant in MUTANTS} == {
        name for name, one in vars(promises).items() if not name.startswith("_") and _is_a_check(one)
    }


def _is_a_check(one: object) -> bool:
    code = getattr(one, "__code__", None)
    is_here = getattr(one, "__module__", None) == promises.__name__ and not isinstance(one, type)
    return code is not None and is_here and not code.co_argcount and not code.co_flags & _NO_CHECK
