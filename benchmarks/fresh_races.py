"""Which races of 2026 are shown here, and how soon: ``python -m benchmarks.fresh_races [--page FILE]``.

Each row of ``fresh_races.toml`` has a mutant, for which generated targets are searched, or the reason for none.
"""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from pathlib import Path
from typing import Final

import msgspec

from lockstep.interruption import interruptible
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.mutant import switched_on
from scripted.search.execution import execute
from scripted.search.generated import generated_schedule

__all__ = ["Race", "found_at", "main", "page_of", "read_races"]

_PAGE: Final = Path("benchmarks/tables/fresh_races.md")
_TARGETS: Final = 400
_COLUMNS: Final = 100


class Race(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A report and its race in one sentence; ``mutant`` shows it, or ``because`` says why none does."""

    report: str
    what: str
    mutant: str = ""
    because: str = ""


def read_races() -> list[Race]:
    """Read the rows. Raises msgspec.ValidationError for a row of another form."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["race"], list[Race])


def found_at(mutant: str) -> int | None:
    """Return how many generated targets show a mutant, the last one included; None if none of the first ones does."""
    with switched_on(adapter_named(DEFAULT_ADAPTER), mutant):
        for number in range(_TARGETS):
            if execute(generated_schedule(number, DEFAULT_ADAPTER)).failure is not None:
                return number + 1
    return None


def page_of(races: list[Race], found: dict[str, int | None]) -> str:
    """Format the page."""
    shown = sum(found.get(race.mutant) is not None for race in races)
    about = (
        "Races that trackers of other engines reported in 2026, as mutants of this engine, or why there is none. "
        f"`python -m benchmarks.fresh_races` searches generated targets without added events, at most {_TARGETS}, and "
        f"writes this page from `benchmarks/fresh_races.toml`. {shown} of {len(races)} are shown."
    )
    rows = ["| report | race | shown by |", "| --- | --- | --- |"]
    for race in races:
        number = found.get(race.mutant)
        missed = f"`{race.mutant}`, by its schedule, but by none of the targets"
        by = race.because or (missed if number is None else f"`{race.mutant}`, target {number}")
        rows.append(f"| {race.report} | {race.what} | {by} |")
    return "\n".join(["# Races of 2026", "", *textwrap.wrap(about, _COLUMNS), "", *rows, ""])


def main() -> None:
    """Search for every mutant of the table and write its page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=Path, default=_PAGE)
    page: Path = parser.parse_args().page
    races = read_races()
    found = {race.mutant: found_at(race.mutant) for race in races if race.mutant}
    page.write_text(page_of(races, found), encoding="utf-8")


if __name__ == "__main__":
    with interruptible("benchmarks"):
        main()
