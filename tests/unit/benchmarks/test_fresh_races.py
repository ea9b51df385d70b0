"""The page of races of 2026 has the rows of its table, and names mutants and defects that there are."""

from __future__ import annotations

from pathlib import Path

from benchmarks.fresh_races import Race, page_of, read_races, shown_on
from scripted.core.adapters import adapter_named
from scripted.core.defects import read_defects
from scripted.core.mutant import read_mutants, refusal_of_mutant

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "benchmarks/tables/fresh_races.md"


def refusal_of(race: Race) -> str | None:
    """The error for a row whose mutant or defect there is not."""
    if race.because:
        return None
    of = race.adapter.partition("+")[0]
    if of in ("vllm", "sglang"):
        # Their engines need not be installed.
        folder = ROOT / f"adapters/scripted_{of}"
        names = [one.name for one in read_mutants(folder / "mutants.toml")]
        names += [one.id for one in read_defects(folder / "defects.toml").defect]
        name = race.mutant or race.defect
        return None if name in names else f"{of} has no {name}"
    return refusal_of_mutant(adapter_named(race.adapter), race.mutant)


def test_the_page_is_what_the_table_and_the_searches_say() -> None:
    races, text = read_races(), PAGE.read_text(encoding="utf-8")
    shown = shown_on(PAGE)
    assert page_of(races, shown) == text, "run python -m benchmarks.fresh_races"
    assert {(race.report, race.what) for race in races} == shown.keys() - {("report", "race"), ("---", "---")}


def test_each_row_names_what_there_is_and_that_was_shown() -> None:
    shown = shown_on(PAGE)
    for race in read_races():
        assert [bool(race.mutant), bool(race.defect), bool(race.because)].count(True) == 1, race
        assert refusal_of(race) is None, refusal_of(race)
        assert bool(race.because) == (shown[race.report, race.what] == "-"), race
