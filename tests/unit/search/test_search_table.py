"""The measurement of the search: it goes on where it was stopped, and its table says what was measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from scripted.cli import app
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.schedule import Schedule
from scripted.search import mutant_search
from scripted.search.execution import Outcome, execute
from scripted.search.generated import number_of
from scripted.search.mutant_search import ALONE, TimedSearch, measure, measured_in, table_of

FOUND_SOON = "flush-answers-but-does-nothing"
FOUND_LATE = "a-deadline-met-exactly-is-missed"


def test_a_search_that_was_measured_is_not_run_again(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    searched: list[TimedSearch] = []
    first = measure(file, [FOUND_SOON, FOUND_LATE], [ALONE, "random"], range(2), schedules=40, watch=searched.append)
    assert len(first) == len(searched) == 8
    assert measured_in(file) == first
    again = measure(file, [FOUND_SOON, FOUND_LATE], [ALONE, "random"], range(2), schedules=40, watch=searched.append)
    assert again == first
    assert len(searched) == 8
    # A line that was cut off, and one that is gone, are measured again, and come out the same.
    lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([*lines[1:-1], lines[-1][:20] + "\n"]))
    repaired = measure(file, [FOUND_SOON, FOUND_LATE], [ALONE, "random"], range(2), schedules=40, watch=searched.append)
    assert len(searched) == 10
    key = [(row.mutant, row.strategy, row.seed, row.schedules, row.target) for row in first]
    assert sorted(key) == sorted((row.mutant, row.strategy, row.seed, row.schedules, row.target) for row in repaired)


def test_a_larger_bound_searches_again_for_what_was_missed_alone(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    (missed,) = measure(file, [FOUND_LATE], [ALONE], [0], schedules=1)
    assert not missed.is_found
    assert missed.schedules == 1
    _, found = measure(file, [FOUND_LATE], [ALONE], [0], schedules=400)
    assert found.is_found
    assert len(measure(file, [FOUND_LATE], [ALONE], [0], schedules=500)) == 2
    assert len(measure(file, [FOUND_LATE], [ALONE], [0], schedules=1)) == 2


def test_a_search_is_bounded_by_its_process_time(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    for strategy in (ALONE, "random"):
        (row,) = measure(file, [FOUND_LATE], [strategy], [0], schedules=900, cpu_seconds=1e-6)[-1:]
        assert not row.is_found
        assert 0 <= row.schedules < 5
    assert len(measure(file, [FOUND_LATE], [ALONE], [0], schedules=900, cpu_seconds=1e-6)) == 2
    assert measure(file, [FOUND_LATE], [ALONE], [0], schedules=900)[-1].is_found


def test_a_mutant_with_which_nothing_runs_is_neither_found_nor_missed(tmp_path: Path) -> None:
    """The page pool refuses every number of pages with this one, before the first step."""
    name = "fresh:memory.pages.PagePool.__init__.0"
    (row,) = measure(tmp_path / "rows.jsonl", [name], ["random"], [0], schedules=4)
    assert not row.is_found
    assert "a page pool needs total >= 1 and page_size >= 1, got" in row.misfit
    assert "SKIPPED" in str(row)


ROWS = [
    TimedSearch("a", ALONE, 0, 100, schedules=7, cpu_s=0.5, target="generated:6", failure="x"),
    TimedSearch("a", ALONE, 1, 100, schedules=11, cpu_s=1.5, target="generated:1010", failure="x"),
    TimedSearch("a", ALONE, 2, 100, schedules=100, cpu_s=9.0),
    TimedSearch("a", "random", 0, 100, schedules=100, cpu_s=9.0),
    TimedSearch("b", ALONE, 0, 100, schedules=100, cpu_s=9.0),
    TimedSearch("c", ALONE, 0, 100, misfit="no such line"),
    TimedSearch("d", ALONE, 0, 100, schedules=100, cpu_s=9.0),
    TimedSearch("d", ALONE, 0, 100, equivalent="nothing reads it"),
    TimedSearch("e", ALONE, 0, 100, failure="HarnessError: judging a step failed"),
    TimedSearch("other", ALONE, 0, 100, schedules=1, cpu_s=9.0, target="generated:0", failure="x"),
]


def test_the_table_counts_seeds_and_takes_medians() -> None:
    assert table_of(ROWS, ["a", "b", "d", "c", "e"]).splitlines() == [
        "| bug | alone | random |",
        "| --- | --- | --- |",
        "| **all 4** | **1 of 3 (33 %), 2 of 5 searches, median 9** | **0 of 1** |",
        "| `a` | 2 of 3, 9, 1.00 s | 0 of 1 in 100 |",
        "| `b` | 0 of 1 in 100 | not searched |",
        "| `c` | not searched | not searched |",
        "| `e` | an error of the harness | not searched |",
        "| `d` | equivalent: nothing reads it |",
    ]


def test_the_command_measures_and_keeps_what_stands_above_the_table(tmp_path: Path) -> None:
    page, file = tmp_path / "page.md", tmp_path / "rows.jsonl"
    page.write_text("# Search\n\nWords.\n\n| bug | old |\n")
    words = ["gallery", "find", FOUND_SOON, "--generated", str(file), "--strategy", ALONE]
    done = CliRunner().invoke(app, [*words, "--schedules", "30", "--seeds", "2", "--markdown", str(page)])
    assert done.exit_code == 0, done.output
    assert page.read_text().startswith(
        "# Search\n\nWords.\n\n| bug | alone |\n| --- | --- |\n| **all 1** | **1 of 1 (100 %)"
    )
    assert len(measured_in(file)) == 2


def test_a_strategy_that_is_none_is_refused(tmp_path: Path) -> None:
    words = ["gallery", "find", "--all", "--generated", str(tmp_path / "rows"), "--strategy", "luck"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 2
    assert "got 'luck'" in done.output


def test_the_page_of_transfers_is_what_was_measured_of_them_all() -> None:
    tables, adapter = Path(__file__).parents[3] / "benchmarks" / "tables", adapter_named("lockstep-decode")
    table = table_of(measured_in(tables / "transfers.jsonl"), adapter.mutant_names, about=adapter.about)
    assert "not searched" not in table
    assert (tables / "transfers.md").read_text(encoding="utf-8").endswith(table)


def test_what_fails_without_the_mutant_too_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler fails as the mutant does in the first target that shows it."""
    (plain,) = measure(tmp_path / "plain.jsonl", [FOUND_SOON], ["random"], [0], schedules=200)
    asked: list[Schedule] = []

    def execute_on_a_sick_scheduler(schedule: Schedule) -> Outcome:
        asked.append(schedule)
        with adapter_named(DEFAULT_ADAPTER).switched_on(FOUND_SOON if len(asked) == 1 else None):
            return execute(schedule)

    monkeypatch.setattr(mutant_search, "execute", execute_on_a_sick_scheduler)
    (row,) = measure(tmp_path / "sick.jsonl", [FOUND_SOON], ["random"], [0], schedules=200)
    assert row.is_found
    assert len(asked) == 2
    assert row.schedules > plain.schedules
    assert (number_of(row.target) or 0) > (number_of(plain.target) or 0)
