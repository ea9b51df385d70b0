"""Known defects with a fix: sorted by it, and mended for a search, a replay and the processes of a search."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripted_lockstep.mutants.gallery import switched_on
from typer.testing import CliRunner

from scripted import api
from scripted.cli import app
from scripted.core.adapters import adapter_named
from scripted.core.defects import Defect, all_fixed, fixable, read_defects
from scripted.core.edits import Edit, EditDoesNotFit
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search import kinds
from scripted.search.execution import execute
from scripted.search.kinds import Sorter
from scripted.search.units import Finding, SearchPlan

FLUSH, ABORT = "flush-ignores-in-flight", "abort-ignores-in-flight"
RACE = "adapter=lockstep pp_size=4 pp_async_depth=2; 1 start a prompt=1; 4 flush"
IDLE = Edit("engine.core.scheduler.books:Books.nothing_in_flight", "return True", "return not self.in_flight")
UPDATED = Edit(IDLE.target, "not self.in_flight", "not self.in_flight and self.update is None")
UPDATED_ALONE = Edit(IDLE.target, "return True", "return True and True")
GONE = Edit(IDLE.target, "no such text", "pass")
FLUSHED = Defect(id="flushed", schedules=(RACE,), fix=(IDLE, UPDATED))
OTHER = Defect(id="other", schedules=(RACE,), fix=(GONE,))


@pytest.fixture(autouse=True)
def sorts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kinds, "_AT_ONCE_S", 600.0)


@pytest.fixture
def broken() -> Iterator[None]:
    """A release with a defect."""
    with switched_on(FLUSH):
        yield


@pytest.fixture
def known(tmp_path: Path) -> Path:
    """A project's file with the defect and its fix."""
    file = tmp_path / "known.toml"
    tables = [f"[[defect]]\nid = 'flushed'\nschedules = [{json.dumps(RACE)}]\n"]
    for edit in FLUSHED.fix:
        fields = (("target", edit.target), ("cut", edit.cut), ("becomes", edit.becomes))
        tables += ["[[defect.fix]]\n" + "".join(f"{name} = {json.dumps(text)}\n" for name, text in fields)]
    file.write_text("".join(tables), encoding="utf-8")
    return file


def failure_of(text: str) -> str:
    failure = execute(Schedule.parse(text)).failure
    return "" if failure is None else failure.signature


def finding(text: str) -> Finding:
    failure = execute(Schedule.parse(text)).failure
    assert failure is not None
    return Finding(text, (), failure)


def run(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, list(arguments))
    if isinstance(done.exception, ScriptDefinitionError):
        raise done.exception
    return done.exit_code, done.output


@pytest.mark.usefixtures("broken")
def test_the_edits_of_a_fix_meet_in_one_function_beside_a_mutant() -> None:
    assert failure_of(RACE)
    with FLUSHED.fixed():
        assert not failure_of(RACE)
    assert failure_of(RACE)


@pytest.mark.usefixtures("broken")
def test_a_fix_that_does_not_fit_changes_nothing_and_is_left_out() -> None:
    half = Defect(id="half", fix=(IDLE, GONE))
    with pytest.raises(EditDoesNotFit, match=r"the fix of half does not fit: .* must have 'no such text' exactly once"):
        half.fixed().__enter__()
    with pytest.raises(EditDoesNotFit), all_fixed([FLUSHED, OTHER]):
        pass
    assert failure_of(RACE), "an edit of a refused fix is still on"
    assert fixable([OTHER, FLUSHED, half, Defect(id="none")]) == (FLUSHED,)


def test_a_fix_is_read_from_a_file(known: Path, tmp_path: Path) -> None:
    assert read_defects(known).defect == (FLUSHED,)
    half = tmp_path / "half.toml"
    half.write_text("[[defect]]\nid = 'x'\n[[defect.fix]]\ntarget = 'a:b'\n", encoding="utf-8")
    with pytest.raises(ScriptDefinitionError, match=r"missing required field `cut`.*defect.*fix"):
        read_defects(half)


@pytest.mark.usefixtures("broken")
def test_a_failure_is_of_the_defect_whose_fix_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever its settings and events are: nothing else is compared."""
    monkeypatch.setattr(Sorter, "_explained", lambda *_: (None, None))
    monkeypatch.setattr(Sorter, "_same", lambda *_: None)
    sorter = Sorter()
    for defect in (OTHER, FLUSHED):
        sorter.add_known(defect, "lockstep")
    sorter.sort(finding("pp_size=2 pp_async_depth=2; 1 start a prompt=70 new=3; 1 start b prompt=5; 3 flush"))
    assert [(kind.defect, kind.seen) for kind in sorter.kinds] == [(OTHER, 0), (FLUSHED, 1)]


@pytest.mark.usefixtures("broken")
def test_a_failure_that_stays_with_the_fixes_is_new() -> None:
    sorter = Sorter()
    sorter.add_known(FLUSHED, "lockstep")
    with switched_on(ABORT):
        sorter.sort(finding("pp_size=4 pp_async_depth=2; 1 start a prompt=125; 3 abort a; 30 flush"))
    assert [kind.defect for kind in sorter.new] == [None]


def test_a_failure_that_needs_two_fixes_is_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Either defect alone fails in this way; the third fix changes nothing."""
    sorter = Sorter()
    with switched_on(FLUSH):
        for name in ("first", "idle", "second"):
            sorter.add_known(Defect(id=name, schedules=(RACE,), fix=(UPDATED_ALONE,)), "lockstep")
        monkeypatch.setattr(
            kinds, "_fails_fixed", lambda *given: not {"first", "second"} <= {one.id for one in given[2]}
        )
        sorter.sort(finding(RACE))
    assert [kind.seen for kind in sorter.kinds] == [1, 0, 0]


@pytest.mark.usefixtures("broken")
def test_a_search_with_the_fixes_finds_nothing_behind_them(known: Path) -> None:
    status, output = run("explore", RACE, "--known", str(known), "--fix-known")
    assert "fixed  1 known defect: flushed" in output
    assert "found  0 new kinds of failure; 0 of the schedules failed" in output, output
    assert status == 0


def test_the_processes_of_a_search_have_the_fixes() -> None:
    """They import the scheduler anew. This fix breaks it, so that its effect is seen."""
    broken = Defect(id="broken", fix=(Edit(IDLE.target, "not self.in_flight and self.update is None", "True"),))
    report = api.explore(RACE, jobs=2, fixed=[broken], schedules=3)
    assert report.failed


def test_a_process_loads_the_adapter_before_it_fixes_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its adapter this scheduler cannot be imported, so that a fix did not fit."""
    example = Path(__file__).parents[3] / "examples/your_scheduler/adapter.py"
    monkeypatch.setattr(sys, "path", [one for one in sys.path if one != str(example.parent)])
    for name in ("adapter", "scheduler"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    adapter_named.cache_clear()
    fix = Edit("scheduler:Scheduler._end", "self._give_back(request)", "pass")
    plan = SearchPlan(adapter=str(example), fixed=(Defect(id="leaks", fix=(fix,)),))
    with plan.switched_on():
        assert str(execute(Schedule.parse(f"adapter={example}; 1 start a prompt=4")).failure)


@pytest.mark.usefixtures("broken")
def test_a_search_with_the_fixes_says_what_fails_without_them(known: Path) -> None:
    race = "adapter=lockstep pp_size=4 pp_async_depth=2; 1 start a prompt=125; 3 abort a; 30 flush"
    with switched_on(ABORT):
        status, output = run("explore", race, "--known", str(known), "--fix-known", "--stop-at-first")
    assert status == 1
    assert "alone  1 of 1 new kind also without the fixes" in output, output


@pytest.mark.usefixtures("broken")
def test_a_schedule_is_replayed_with_the_fixes(known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(known.parent)
    known.rename(known.with_name("scripted-known.toml"))
    assert run("replay", RACE)[0] == 1
    assert run("replay", RACE, "--fix-known")[0] == 0


def test_fixes_are_refused_where_the_scheduler_runs_as_it_is(known: Path) -> None:
    with pytest.raises(
        ScriptDefinitionError, match="--fix-known does not go with --mutant, which runs without the fix"
    ):
        run("explore", "--known", str(known), "--fix-known", "--mutant", FLUSH)
    with pytest.raises(ScriptDefinitionError, match="none of the 1 known defects of lockstep has a fix that fits"):
        run("explore", "--known", str(known), "--fix-known")
    with pytest.raises(ScriptDefinitionError, match="does not go with --twice"):
        run("replay", RACE, "--fix-known", "--twice")
