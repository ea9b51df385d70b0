"""A campaign on a tiny core: a mutant is noticed, survives, is never run or never ends, and the score counts it so."""

import sys
from pathlib import Path

import pytest

from tools.mutation import command
from tools.mutation import healthy as healthy_runs
from tools.mutation.campaign import Result, Verdict, pursue, read_results
from tools.mutation.operators import mutants_of
from tools.mutation.score import score_of, survivors_of
from tools.mutation.suites import Suite

CORE = """
STEP = 1


class Counter:
    def __init__(self):
        self.value = 0

    def up_to(self, most: int, *, by: int = STEP) -> int:
        while self.value < most:
            self.value += by
        return self.value

    @property
    def unused(self):
        return self.value + 1


def is_small(value):
    return value < 10
"""


class CoreUnit:
    """Counts to three, and asks for something small."""

    suite = Suite.UNIT
    name = "core"

    def run(self):
        import tiny_core

        count = tiny_core.Counter().up_to(3)
        if count != 3:
            return f"counted to {count}"
        return None if tiny_core.is_small(2) else "2 is not small"


@pytest.fixture
def core(tmp_path, monkeypatch):
    """The core, importable by its name, in the current folder."""
    (tmp_path / "tiny_core.py").write_text(CORE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield mutants_of("tiny_core.py", CORE)
    sys.modules.pop("tiny_core", None)


def results_of(mutants, done=()):
    units = [CoreUnit()]
    measured = healthy_runs.measure(units, ["tiny_core.py"], 1)
    results = []
    pursue(mutants, units, measured, done=done, jobs=2, found=results.append)
    return results


def chosen(mutants, **wanted):
    return [one for one in mutants if all(getattr(one, name) == value for name, value in wanted.items())]


def verdicts(mutants, **wanted):
    picked = chosen(mutants, **wanted)
    assert picked, wanted
    return {one.mutant.partition(" ")[2]: one.verdict for one in results_of(picked)}


def test_a_wrong_result_is_noticed(core):
    assert verdicts(core, function="Counter.up_to", operator="compare") == {
        "compare < -> <=": Verdict.KILLED,
        "compare < -> >=": Verdict.KILLED,
    }


def test_what_makes_no_difference_to_the_unit_survives(core):
    assert verdicts(core, function="is_small", operator="constant") == {
        "constant 10 -> 11": Verdict.SURVIVED,
        "constant 10 -> 9": Verdict.SURVIVED,
    }


def test_what_no_unit_runs_is_never_tried(core):
    assert set(verdicts(core, function="Counter.unused").values()) == {Verdict.UNREACHED}


def test_results_that_are_there_are_not_made_again(core):
    mutants = chosen(core, function="is_small")
    first = results_of(mutants)
    assert results_of(mutants, done=first) == []


def test_results_are_read_back_but_for_a_torn_line(tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text('{"mutant":"a:1:2 compare","suite":"unit","verdict":"killed"}\n{"mutant":"a:1:')
    assert read_results(file) == [Result("a:1:2 compare", Suite.UNIT, Verdict.KILLED)]
    assert read_results(tmp_path / "none") == []


def test_the_score_counts_by_suite_and_together(core):
    mutants = chosen(core, function="is_small")
    one, two, *rest = mutants
    results = [
        Result(one.id, Suite.SEARCH, Verdict.KILLED),
        Result(one.id, Suite.UNIT, Verdict.SURVIVED),
        Result(two.id, Suite.SEARCH, Verdict.UNREACHED),
        Result(two.id, Suite.UNIT, Verdict.SURVIVED),
        Result(rest[0].id, Suite.UNIT, Verdict.SAME),
    ]
    score = score_of(mutants, results)
    rows = {row.suite: (row.noticed, row.of, row.unreached) for row in score.rows}
    assert rows == {"search": (1, 2, 1), "unit": (0, 2, 0), "any": (1, 2, 0)}
    assert score.left_out == 1
    assert survivors_of(mutants, results, Suite.UNIT) == [one, two]
    assert survivors_of(mutants, results, None) == [two]


def test_a_folder_of_results_that_cannot_be_made_is_refused_before_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(sys, "argv", ["mutation", "--out", str(tmp_path / "file" / "results")])
    with pytest.raises(SystemExit):
        command.main()
    assert f"{tmp_path / 'file'} is no folder; name another one" in capsys.readouterr().err
