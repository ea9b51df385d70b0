"""The page of planted bugs is what the rows of the searches say, and names bugs that there are."""

from __future__ import annotations

from pathlib import Path

from benchmarks.planted_bugs import page_of, plants_of
from scripted.search.mutant_search import measured_in

TABLES = Path(__file__).parents[3] / "benchmarks/tables"
ENGINES = ("vllm", "sglang")


def test_the_page_is_what_the_rows_say() -> None:
    measured = {one: {row.mutant: row for row in measured_in(TABLES / f"planted_{one}.jsonl")} for one in ENGINES}
    assert page_of(measured) == (TABLES / "planted_bugs.md").read_text(encoding="utf-8")
    assert all(measured[one].keys() <= {bug.name for bug in plants_of(one).all} for one in ENGINES)
