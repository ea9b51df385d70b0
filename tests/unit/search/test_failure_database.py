"""Failures are kept, run first the next time, and dropped when they no longer fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_lockstep.mutants.gallery import switched_on
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.search.execution import Failure, execute
from scripted.search.failure_database import FAILURES_LIMIT, FailureDatabase

RACE = Schedule.parse("pp_size=4 pp_async_depth=2; 1 start a prompt=1; 4 flush")
FLUSH = "flush-ignores-in-flight"


def failure_of(schedule: Schedule) -> Failure:
    failure = execute(schedule).failure
    assert failure is not None
    return failure


def test_what_still_fails_is_told_and_what_does_not_is_dropped(tmp_path: Path) -> None:
    database = FailureDatabase(tmp_path / "project" / "failures.jsonl")
    with switched_on(FLUSH):
        found = failure_of(RACE)
        database.add(RACE, found)
        (replayed,) = database.replay("lockstep")
    assert replayed.failure == found
    assert [one.schedule for one in database.read()] == [str(RACE)]
    assert list(database.replay("vllm")) == []
    (replayed,) = database.replay("lockstep")
    assert (replayed.failure, replayed.why) == (None, "it no longer fails")
    assert database.read() == []


def test_each_is_kept_under_its_number_and_of_all_so_many(tmp_path: Path) -> None:
    """Two causes may break the same promise with the same words; one schedule is one finding."""
    database = FailureDatabase(tmp_path / "failures.jsonl")
    database.add(RACE, Failure("Violation", "1", 1, "a kind"))
    database.add(Schedule.parse("default; 1 flush"), Failure("Violation", "2", 1, "a kind"))
    database.add(RACE, Failure("Violation", "3" * 100_000, 1, "a kind"))
    assert [(one.number, one.text[:1]) for one in database.read()] == [(2, "2"), (1, "3")]
    assert len((tmp_path / "failures.jsonl").read_bytes()) < 5_000
    for number in range(FAILURES_LIMIT):
        database.add(Schedule.parse(f"default; {number + 2} flush"), Failure("Violation", "", 1, "a kind"))
    assert len(database.read()) == FAILURES_LIMIT
    assert database.forget(150).schedule == "default; 149 flush"
    assert 150 not in [one.number for one in database.read()]
    assert [path.name for path in tmp_path.iterdir()] == ["failures.jsonl"]


OTHERS = [Schedule.parse(f"default; {step} flush") for step in range(1, 5)]


def kept(tmp_path: Path, schedules: list[Schedule]) -> FailureDatabase:
    database = FailureDatabase(tmp_path / "failures.jsonl")
    for schedule in schedules:
        database.add(schedule, Failure("Violation", "", 1, "a kind"))
    return database


def test_no_number_comes_again_while_others_are_kept(tmp_path: Path) -> None:
    database = kept(tmp_path, OTHERS[:2])
    database.forget(1)
    assert database.add(OTHERS[2], Failure("Violation", "", 1, "a kind")).number == 3


def test_the_oldest_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripted.search.failure_database.FAILURES_LIMIT", 2)
    assert [one.schedule for one in kept(tmp_path, OTHERS).read()] == [str(one) for one in OTHERS[2:]]


def test_the_newest_is_run_first(tmp_path: Path) -> None:
    database = kept(tmp_path, OTHERS)
    assert [one.saved.number for one in database.replay("lockstep")] == [4, 3, 2, 1]


def test_further_failures_are_added_to_those_before(tmp_path: Path) -> None:
    database = kept(tmp_path, OTHERS[:2])
    for _ in range(2):
        database.add_seen({2: 3})
    assert [(one.number, one.seen) for one in database.read()] == [(1, 1), (2, 7)]


def test_a_line_that_means_nothing_any_more_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    file.write_text('{"adapter":"lockstep","schedule":"old_setting=3; 1 flush","signature":"s","text":"t"}\n')
    (replayed,) = FailureDatabase(file).replay("lockstep")
    assert replayed.failure is None
    assert "cannot be read any more" in replayed.why
    assert file.read_text() == ""


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    file.write_text("Lorem ipsum\n")
    with pytest.raises(ScriptDefinitionError, match=r"line 1 of .*failures.jsonl is not a saved failure"):
        FailureDatabase(file).read()


RIGHT = '{"adapter":"lockstep","schedule":"1 start a prompt=1","signature":"s","text":"t"}\n'
DAMAGED = {
    "no UTF-8": b'{"adapter":"lockstep\xff","schedule":"","signature":"","text":""}',
    "no JSON": b'{"adapter":"lock',
    "brackets": b"[" * 100_000,
    "another shape": b'{"adapter":3}',
}


@pytest.mark.parametrize("line", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_line_is_set_aside_and_nothing_else_is_lost(tmp_path: Path, line: bytes) -> None:
    file = tmp_path / "failures.jsonl"
    file.write_bytes(RIGHT.encode() + line + b"\n" + RIGHT.replace('"s"', '"other"').encode())
    database = FailureDatabase(file)
    assert [one.signature for one in database.read()] == ["s", "other"]
    (said,) = database.set_damaged_aside()
    assert said.startswith(f"line 2 of {file} is not a saved failure (")
    assert [one.signature for one in database.read()] == ["s", "other"]
    assert (tmp_path / "failures.jsonl.damaged").read_bytes() == line + b"\n"
    assert database.set_damaged_aside() == []


def test_a_kept_text_with_a_line_of_its_own_is_one_line(tmp_path: Path) -> None:
    """U+2028 ends a line of a text, and none of a file of JSON."""
    file = tmp_path / "failures.jsonl"
    file.write_text(RIGHT.replace('"t"', '"a\u2028b\u0085c"'), encoding="utf-8")
    (kept,) = FailureDatabase(file).read()
    assert kept.text == "a\u2028b\u0085c"
    assert FailureDatabase(file).set_damaged_aside() == []


def test_explore_keeps_what_it_finds_and_runs_it_first(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    arguments = ["explore", str(RACE), "--schedules", "1", "--no-coverage", "--failures", str(file)]
    with switched_on(FLUSH):
        found = CliRunner().invoke(app, arguments)
        again = CliRunner().invoke(app, arguments)
    assert found.exit_code == again.exit_code == 1
    assert "STILL FAILS" not in found.output
    assert "STILL FAILS" in again.output
    mended = CliRunner().invoke(app, arguments)
    assert mended.exit_code == 0
    assert "dropped a kept failure: it no longer fails" in mended.output
    assert file.read_text() == ""


def test_a_line_of_an_older_version_gets_a_number(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    file.write_text(RIGHT + RIGHT.replace('"s"', '"s","number":4'))
    assert [one.number for one in FailureDatabase(file).read()] == [5, 4]


@pytest.mark.parametrize("more", [["--mutant", FLUSH], ["--no-keep"]])
def test_a_mutant_leaves_nothing_behind(tmp_path: Path, more: list[str]) -> None:
    file = tmp_path / "failures.jsonl"
    CliRunner().invoke(app, ["explore", str(RACE), "--schedules", "1", "--failures", str(file), *more])
    assert not file.exists()


def test_an_adapter_that_cannot_be_loaded_loses_no_failure(tmp_path: Path) -> None:
    file = tmp_path / "failures.jsonl"
    adapter = tmp_path / "adapter.py"
    adapter.write_text("import a_scheduler_that_is_not_on_the_path\n")
    line = f'{{"adapter":"{adapter}","schedule":"1 start a prompt=1","signature":"s","text":"t"}}\n'
    file.write_text(line)
    with pytest.raises(ScriptDefinitionError, match="a_scheduler_that_is_not_on_the_path"):
        list(FailureDatabase(file).replay(str(adapter)))
    assert file.read_text() == line
