"""``scripted findings``: what searches have kept, by number."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_lockstep.mutants.gallery import switched_on
from typer.testing import CliRunner

from scripted.cli import app
from scripted.cli.console import plain_console
from scripted.cli.search import _Shown
from scripted.core.defects import DEFAULT_KNOWN, Defect, add_known
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.execution import execute
from scripted.search.failure_database import FailureDatabase

LATE = "abort-waits-for-a-token"
RACE = Schedule.parse("pp_size=2; 1 start long-name prompt=40 new=3; 1 start b prompt=33 seed=1; 3 abort long-name")


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with one finding, while its bug is there."""
    monkeypatch.chdir(tmp_path)
    with switched_on(LATE):
        failure = execute(RACE).failure
        assert failure is not None
        FailureDatabase().add(RACE, failure)
        yield tmp_path / ".scripted/failures.jsonl"


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(words))
    if isinstance(result.exception, ScriptDefinitionError):
        raise result.exception
    return result.exit_code, result.output


@pytest.mark.usefixtures("kept")
def test_a_finding_is_listed_shown_shrunk_and_forgotten() -> None:
    assert "   1  lockstep, seen 1 time: " in run("findings")[1]
    status, output = run("findings", "show", "1")
    assert status == 1
    assert "start long-name" in output
    assert "FAILED:" in output
    assert "shrunk to 2 events" in run("findings", "shrink", "1")[1]
    assert "start a prompt=" in run("findings", "show", "1")[1]
    run("findings", "forget", "1")
    assert run("findings")[1] == "0 findings in .scripted/failures.jsonl\n"
    with pytest.raises(ScriptDefinitionError, match="keeps no finding 1; there are: none"):
        run("findings", "show", "1")


def test_a_finding_is_reported_and_measured_by_its_number(kept: Path, tmp_path: Path) -> None:
    """A maintainer gets the same file as from the schedule itself."""
    files = [tmp_path / name for name in ("number.md", "schedule.md")]
    for what, file in zip(("1", str(RACE)), files, strict=True):
        assert run("report", what, "--workloads", "0", "--markdown", str(file)) == (0, "")
    assert files[0].read_text() == files[1].read_text()
    assert "```text\n    " in files[0].read_text(), "the head of the table stands over its column"
    assert "start long-name" in run("reach", "1", "--workloads", "0", "--failures", str(kept))[1]
    with pytest.raises(ScriptDefinitionError, match="keeps no finding 2; there are: 1"):
        run("report", "2")


def test_a_known_finding_fails_no_search(kept: Path) -> None:
    """The first three lines of the report say what was run, what was found and what to do now."""
    explore = ("explore", str(RACE), "--schedules", "1")
    status, output = run(*explore)
    assert status == 1
    ran, found, what_next = (line for line in output.splitlines() if line.startswith(("ran ", "found ", "next ")))
    assert "1 schedules of lockstep" in ran
    assert "0 new kinds of failure, 1 kept one still there" in found
    assert "scripted findings show 1" in what_next
    assert run("findings", "known", "1", "--upstream", "54028", "--because", "a test")[0] == 0
    assert kept.read_text() == ""
    status, output = run(*explore)
    assert status == 0
    assert "known  lockstep-54028: " in output
    assert output.splitlines()[-1].startswith("passed: no new failure in 1 schedule")
    Path("scripted-known.toml").unlink()
    assert run(*explore, "--no-keep")[0] == 1


def test_the_first_sighting_was_counted_when_it_was_kept() -> None:
    added: dict[int, int] = {}
    shown = _Shown(plain_console(), SimpleNamespace(add_seen=added.update), None, standalone=False)
    kinds = [(1, True, 3), (2, False, 3), (0, True, 5)]
    shown.keep_counts([SimpleNamespace(number=number, is_new=is_new, seen=seen) for number, is_new, seen in kinds])
    assert added == {1: 2, 2: 3}


@pytest.mark.usefixtures("kept")
def test_what_the_project_has_accepted_meanwhile_is_not_told_again() -> None:
    add_known(DEFAULT_KNOWN, Defect(id="late", schedules=(f"adapter=lockstep {RACE}",), because="rare"))
    status, output = run("explore", str(RACE), "--schedules", "1")
    assert "STILL FAILS" not in output
    assert status == 0, output
