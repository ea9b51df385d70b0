"""The commands of the search: their words, their exit status, what they write."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from scripted_lockstep.gallery_page import results_on
from scripted_lockstep.mutants import ESCAPES, RACES
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.refusals import ScriptDefinitionError
from scripted.report.rerun import Rerun
from scripted.reruns import rerun

RACE = "pp_size=4 pp_async_depth=2; 1 start a prompt=1; 4 flush"
FLUSH = ["--mutant", "flush-ignores-in-flight"]


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if isinstance(result.exception, ScriptDefinitionError):
        raise result.exception
    return result.exit_code, result.output


def test_explore_finds_shrinks_and_writes(tmp_path: Path) -> None:
    written = tmp_path / "test_found.py"
    status, output = run("explore", "one-row", *FLUSH, "--to-script", str(written))
    assert status == 1
    assert "This request holds the node from another tree" in output
    assert "shrunk to 2 events" in output
    assert "scripted replay 'pp_" in output
    assert "events met nothing to act on" in output
    assert re.match(r"FAILED: \d kinds of failure in ", output.splitlines()[-1])
    assert "def test_one_row_breaks(t):" in written.read_text(encoding="ascii")


def test_explore_passes_on_the_engine() -> None:
    status, output = run("explore", "default; 1 start a prompt=3 new=1", "--no-coverage")
    assert status == 0
    assert "complete" in output
    assert output.splitlines()[-1].startswith("passed: no failure in ")


def test_a_scenario_is_a_schedule_in_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scenarios.py"
    file.write_text(
        "from scripted.core.schedule import Schedule\nTINY = Schedule.parse('default; 1 start a prompt=3 new=1')\n",
        encoding="ascii",
    )
    assert run("explore", f"{file}::TINY", "--strategy", "random", "--schedules", "20")[0] == 0


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(ScriptDefinitionError, match="no workload is called"):
        run("explore", "no-such-workload")


def test_the_name_on_the_page_of_the_contract_lists_all_workloads() -> None:
    """A name that is near to another, as no-such-name was, gets that one alone."""
    page = (Path(__file__).parents[3] / "docs/script_api.md").read_text(encoding="utf-8")
    (name,) = re.findall(r"`scripted explore '(\S+)'` lists the workloads", page)
    with pytest.raises(ScriptDefinitionError, match="there are chunked-alone, "):
        run("explore", name)


def test_replay_shows_the_race_and_leaves_a_trace(tmp_path: Path) -> None:
    trace = tmp_path / "race.jsonl"
    status, output = run("replay", RACE, *FLUSH, "--trace", str(trace))
    assert status == 1
    assert "FAILED: IntegrityError: This request holds the node from another tree" in output
    assert "flush -> 200" in output
    header = json.loads(trace.read_text(encoding="utf-8").splitlines()[0])["header"]
    assert "from another tree" in header["outcome"]
    assert header["mutant"] == "flush-ignores-in-flight"
    assert run("view", str(trace))[0] == 0


def test_replay_passes_without_the_mutant() -> None:
    status, output = run("replay", RACE)
    assert status == 0
    assert "flush -> refused 400" in output
    status, output = run("replay", RACE, "--until", "3")
    assert "3 steps, digest" in output


def test_gallery_find_says_how_soon(tmp_path: Path) -> None:
    page, readme = tmp_path / "benchmarks" / "tables" / "gallery.md", tmp_path / "README.md"
    page.parent.mkdir(parents=True)
    page.write_text(
        "# The gallery\n\nAbove.\n\n### stale\n\n- Search: never.\n\n### head-blocks-the-queue\n\n- Search: kept.\n"
    )
    rows = "| `decode-runs-twice` | origin | schedule 0, 0.00 s |\n| `other` | origin | schedule 7 |\n"
    counts = "0 races and scheduling bugs that\n0 more were found by review of\n"
    readme.write_text(f"{rows}{counts}0 of 0 bugs, 0 of them with one\nadded event.\n")
    status, output = run("gallery", "find", "decode-runs-twice", "--markdown", str(page))
    assert status == 0
    assert "decode-runs-twice: schedule " in output
    text = page.read_text(encoding="utf-8")
    assert text.startswith("# The gallery\n\nAbove.\n\n## Races of real engines\n\n### ")
    assert "### decode-runs-twice\n" in text
    assert "### stale" not in text
    assert results_on(text)["head-blocks-the-queue"] == "kept"
    first, other, races, escapes, by_search, _ = readme.read_text().splitlines()
    assert by_search == f"1 of {len(RACES) + len(ESCAPES)} bugs, 0 of them with one"
    assert races == f"{len(RACES)} races and scheduling bugs that"
    assert escapes == f"{len(ESCAPES)} more were found by review of"
    assert first.startswith("| `decode-runs-twice` | origin | schedule ")
    assert "schedule 0," not in first
    assert other == "| `other` | origin | schedule 7 |"


def test_a_run_that_is_another_one_in_a_fresh_process_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def otherwise(target: str, *, until: int | None, mutant: str | None) -> Rerun:
        run = rerun(target, until=until, mutant=mutant)
        first, *rest = run.log.steps
        return replace(run, log=replace(run.log, steps=(replace(first, digest="another"), *rest)))

    line = "default; 1 start a prompt=5 new=2"
    with monkeypatch.context() as patched:
        patched.setattr("scripted.reruns.rerun_in_fresh_process", rerun)
        same = CliRunner().invoke(app, ["replay", line, "--twice"])
    assert same.exit_code == 0
    assert "the same again here and in a fresh process" in same.output
    monkeypatch.setattr("scripted.reruns.rerun_in_fresh_process", otherwise)
    other = CliRunner().invoke(app, ["replay", line, "--twice"])
    assert "NOT DETERMINISTIC in a fresh process: step 1, digest: " in other.output
    assert other.exit_code == 1
