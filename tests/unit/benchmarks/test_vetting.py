"""The scripts of the table of vetting, and its counts."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from benchmarks.vetting import page_of, sources, verdict_on

PAGE = Path(__file__).parents[3] / "benchmarks" / "tables" / "vetting.md"


@pytest.mark.parametrize("kind", ["right", "silent"])
def test_each_source_has_one_script_and_each_row_its_source(kind: str) -> None:
    found = sources(kind)
    assert all(source.count("@scripted(") == 1 for source in found.values())
    assert all(ast.parse(source) for source in found.values())
    rows = [
        line.split(" | ")[1] for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {kind}")
    ]
    assert rows == [*found]


def test_no_right_script_is_accused_and_few_silent_ones_are_unnoticed() -> None:
    """46: at most 5 of 74."""
    rows = [line.split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines()]
    assert [row for row in rows if row[0] == "| right" and row[2] != "yes"] == []
    silent = [row[2] == "yes" and not row[3].strip(" |") for row in rows if row[0] == "| silent"]
    assert sum(silent) <= 5 / 74 * len(silent)


def test_a_refused_script_is_noticed(tmp_path: Path) -> None:
    is_a_test, (remark,) = verdict_on(sources("silent")["a text"], tmp_path / "one")
    assert not is_a_test
    assert remark.startswith("refused where it is decorated")


def test_the_page_counts_both_mistakes() -> None:
    page = page_of({"good": (True, ()), "accused": (False, ("why",))}, {"quiet": (True, ()), "told": (True, ("why",))})
    assert "1 right scripts are not called tests; 1 silent scripts are called tests" in " ".join(page.split())
