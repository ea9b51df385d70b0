"""The summary of many scripts: what was compared, and which tests left what may be a mistake."""

from __future__ import annotations

from scripted.report.tally import SummaryOfScripts


def summary() -> SummaryOfScripts:
    tally = SummaryOfScripts()
    for number in range(5):
        tally.add(f"test_{number}", {"steps": 10, "compared": number, "requests alive at the end": 2})
    tally.add("test_clean", {"steps": 1, "compared": 0})
    return tally


def test_the_first_line_has_the_totals() -> None:
    """A race test fails if its window never opened (D03)."""
    first, *_ = summary().lines()
    assert first == "6 scripts, 51 steps, 10 outputs compared with the same request run alone"


def test_each_loose_end_names_some_of_its_tests_or_all() -> None:
    lines = list(summary().lines())
    assert lines[1] == "requests alive at the end: 10, in 5 scripts:"
    assert lines[2:] == ["    test_0", "    test_1", "    test_2", "    and 2 more (-v names them)"]
    assert list(summary().lines(verbose=True))[2:] == [f"    test_{number}" for number in range(5)]
