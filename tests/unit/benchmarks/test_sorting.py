"""The page of sorted failures is what its rows say, and names defects that there are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.sorting import Sorted, _has_all_of, page_of
from scripted.core.defects import defects_of
from scripted.core.schedule import Schedule

TABLES = Path(__file__).parents[3] / "benchmarks/tables"


def test_the_page_is_what_the_rows_say() -> None:
    rows = [msgspec.json.decode(line, type=Sorted) for line in (TABLES / "sorting.jsonl").read_bytes().splitlines()]
    assert page_of(rows) == (TABLES / "sorting.md").read_text(encoding="utf-8")
    for release in {row.release for row in rows}:
        named = {row.defect for row in rows if row.release == release}
        assert named <= {defect.id for defect in defects_of(release.split()[0])}


def test_pairs_are_counted_by_cause_and_by_text() -> None:
    def row(defect: str, kind: int, failures: int, known: str) -> Sorted:
        words = {"release": "x 1.0", "signature": "hangs", "known": known, "defect": defect}
        return Sorted(**words, kind=kind, failures=failures, seed=2)

    page = page_of([row("late", 0, 2, "late"), row("late", 1, 1, "lost"), row("lost", 1, 1, "")])
    # Of three pairs of one defect, two are in two kinds; of three pairs of two, one is in one kind. One text joins all.
    # Of the two pairs of one kind, one is of two defects; by text, three of six.
    assert "| x 1.0 | 2 | 2 | 4 | 3 | 66.7% | 0.0% | 3 | 33.3% | 100.0% | 2 | 50.0% | 50.0% |" in page
    assert "| x 1.0 | 4 | 2 | 1 | 1 |" in page
    assert "| late | 3 | 2, 1 (lost) |" in page
    assert "| lost | 1 | 1 (late) |" in page


@pytest.mark.parametrize(
    ("smallest", "is_of_it"),
    [
        ("pp_size=2; 1 start a prompt=3; 1 start b prompt=1; 2 abort a", True),
        ("pp_size=4 page_size=2; 1 start a prompt=3; 1 start b prompt=1; 2 abort a; 4 abort b", True),
        ("default; 1 start a prompt=3; 1 start b prompt=1; 2 abort a", False),
        ("pp_size=2; 1 start a prompt=3; 2 abort a", False),
        ("pp_size=2; 1 start a prompt=3; 1 start b prompt=1", False),
    ],
)
def test_a_failure_that_needs_less_than_a_defect_is_another(smallest: str, is_of_it: bool) -> None:
    least = Schedule.parse("pp_size=2; 1 start a prompt=1; 1 start b prompt=1; 2 abort a")
    assert _has_all_of(least, Schedule.parse(smallest)) is is_of_it
