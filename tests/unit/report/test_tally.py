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


def test_assertions_that_say_nothing_are_named_with_their_tests() -> None:
    """An assertion of a shared helper is reported if no test reached it."""
    tally = SummaryOfScripts()
    tally.add("test_a", {"asked: a.py:3: assert r.error": 0, "asked: a.py:4: assert r.finished": 1})
    tally.add("test_b", {"asked: a.py:3: assert r.error": 0, "asked: a.py:9: assert r.rid": 0})
    tally.add_counts("test_b", {"never fails: a.py:5: assert r": 1})
    tally.add("test_c", {"asked: a.py:9: assert r.rid": 2})
    assert list(tally.lines())[1:] == [
        "assertions that can never fail: 1",
        "    a.py:5: assert r, in",
        "        test_b",
        "assertions that no run of these scripts reached: 1",
        "    a.py:3: assert r.error, in",
        "        test_a",
        "        test_b",
    ]
