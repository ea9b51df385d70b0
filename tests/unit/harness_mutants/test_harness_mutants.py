"""Each check of the harness is broken on purpose, and noticed.

A mutant names the check that must notice it: a function of ``promises.py``, which runs in this process, or a test of
another file, which runs in a copy of the repository with the mutant in it. ``pytest tests/unit/harness_mutants -v --vet
off`` runs them all and shows each with its check.
"""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path

import promises
import pytest
from thinned import thinned

from benchmarks.edited_tree import EditedTree
from scripted.core.edits import EditDoesNotFit
from scripted.core.mutant import Mutant, read_mutants

ROOT = Path(__file__).parents[3]
MUTANTS = read_mutants(Path(__file__).with_name("mutants.toml"))
OF_TESTS = [mutant for mutant in MUTANTS if mutant.test.startswith("tests/")]
OF_PROMISES = [mutant for mutant in MUTANTS if mutant not in OF_TESTS]
# The rooms of the harness, each of which has checks to break.
ROOMS = {"cli", "core", "fleets", "report", "script", "sdk", "search", "shell", "pytest_plugin", "pytest_session"}

_NO_CHECK = inspect.CO_GENERATOR | inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def _shown(mutant: Mutant) -> str:
    return f"{mutant.name}:{mutant.test.rpartition('::')[2]}"


@functools.cache
def _hold(name: str) -> None:
    """The promises hold as long as nothing is broken."""
    getattr(promises, name)()


@pytest.mark.parametrize("mutant", thinned(OF_PROMISES, one_in=4), ids=_shown)
def test_a_broken_harness_is_noticed(mutant: Mutant) -> None:
    """46.13: by the quickest check that can."""
    _hold(mutant.test)
    with mutant.switched_on(), pytest.raises((Exception, pytest.fail.Exception)):
        getattr(promises, mutant.test)()


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> EditedTree:
    return EditedTree(tmp_path_factory.mktemp("edited"))


@pytest.mark.nightly
@pytest.mark.parametrize("mutant", OF_TESTS, ids=_shown)
def test_a_broken_harness_makes_its_test_red(mutant: Mutant, tree: EditedTree) -> None:
    """46.13: also where the test runs the harness in processes of its own."""
    with tree.with_mutant(mutant):
        done = tree.pytest(mutant.test)
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, f"{mutant.bug}: not noticed\n{done.stdout}{done.stderr}"
    assert f"FAILED {mutant.test}" in done.stdout


def test_every_mutant_fits_and_its_test_is_there() -> None:
    """By day, before the night runs them: a cut whose code has changed, and a test that was renamed."""
    wrong = []
    for mutant in OF_TESTS:
        file, _, name = mutant.test.partition("::")
        if name.partition("[")[0] not in _functions_of(ROOT / file):
            wrong.append(f"{mutant.name}: there is no {mutant.test}")
    for mutant in MUTANTS:
        try:
            with mutant.switched_on():
                pass
        except EditDoesNotFit as exc:
            wrong.append(str(exc))
    assert not wrong, "\n".join(wrong)


def test_every_part_is_broken() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.test for mutant in OF_PROMISES} == {
        name for name, one in vars(promises).items() if not name.startswith("_") and _is_a_check(one)
    }
    assert {mutant.target.split(":")[0].split(".")[1] for mutant in OF_TESTS} >= ROOMS


# The rooms of the harness that have checks to break.
PARTS = (
    "",
    ".core",
    ".core.promises",
    ".script",
    ".search",
    ".sdk",
    ".sdk.flight",
    ".fleets",
    ".report",
    ".shell",
    ".cli",
)


@functools.cache
def _functions_of(file: Path) -> frozenset[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return frozenset([node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)])


def _is_a_check(one: object) -> bool:
    code = getattr(one, "__code__", None)
    is_here = getattr(one, "__module__", None) == promises.__name__ and not isinstance(one, type)
    return code is not None and is_here and not code.co_argcount and not code.co_flags & _NO_CHECK
