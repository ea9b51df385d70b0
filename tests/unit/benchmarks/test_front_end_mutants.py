"""The page of the front end's mutants is what its results say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.front_end_mutants import page_of, read_batches, results_in

PAGE = Path(__file__).parents[3] / "benchmarks/tables/front_end_mutants.md"


def test_the_page_is_what_the_batches_and_the_results_say() -> None:
    mutants, results = read_batches(), results_in(PAGE.with_suffix(".jsonl"))
    assert page_of(mutants, results) == PAGE.read_text(encoding="utf-8"), "run python -m benchmarks.front_end_mutants"
    assert [*results] == [mutant.name for mutant in mutants]
