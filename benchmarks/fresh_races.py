"""Measures how soon the search shows races of 2026: ``python -m benchmarks.fresh_races [--page FILE] [NAME ...]``.

Each row of ``fresh_races.toml`` names a mutant of some adapter, a defect of a release, or the reason for neither. Rows
of engines that are not installed keep their text on the page; with names of adapters, mutants or defects, so do all
other rows.
"""

from __future__ import annotations

import argparse
import textwrap
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec
from scripted_lockstep.mutants import mutant_named

from lockstep.interruption import interruptible
from scripted.core.adapters import DEFAULT_ADAPTER, adapter_named
from scripted.core.defects import defects_of
from scripted.core.mutant import switched_on
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.sdk import SchedulerAdapter
from scripted.search.campaign import Campaign, SearchReport
from scripted.search.execution import execute
from scripted.search.generated import first_of, generated_schedule
from scripted.search.mutant_search import adapter_of
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

__all__ = ["Race", "how_shown", "main", "page_of", "read_races", "shown_on"]

_PAGE: Final = Path("benchmarks/tables/fresh_races.md")
_TARGETS: Final = 400
_SCHEDULES: Final = 1000
_COLUMNS: Final = 100
_HEADS: Final = ("report", "race", "as", "shown by")
_NOT_SHOWN: Final = "-"


class Race(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A report and its race in one sentence.

    A ``mutant`` of ``adapter`` shows it, with a ``workload`` by a sweep of that workload; or a ``defect`` of the
    adapter's table shows it on the release; or ``because`` is the reason why nothing does.
    """

    report: str
    what: str
    adapter: str = DEFAULT_ADAPTER
    mutant: str = ""
    workload: str = ""
    defect: str = ""
    because: str = ""

    @property
    def shown_as(self) -> str:
        """Return the mutant or the defect with its adapter, or the reason why there is neither."""
        if self.because:
            return self.because
        adapter, _, settings = self.adapter.partition("+")
        where = "" if adapter == DEFAULT_ADAPTER else f" of `{adapter}`"
        if settings:
            where += f" with `{settings.rpartition(':')[2]}`"
        return f"`{self.mutant}`{where}" if self.mutant else f"the defect `{self.defect}`{where}"


def read_races() -> list[Race]:
    """Read the rows. Raises msgspec.ValidationError for a malformed row."""
    text = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    return msgspec.convert(tomllib.loads(text)["race"], list[Race])


def how_shown(race: Race) -> str:
    """Search for a race; return how it was found, or ``-``.

    Raises ScriptDefinitionError or ImportError if the adapter or its engine is not installed.
    """
    if race.because:
        return _NOT_SHOWN
    if race.defect:
        return _by_the_release(race)
    if race.workload:
        return _by_a_sweep(race)
    number = _first_target(race)
    if number is not None:
        return f"target {number}"
    plan = SearchPlan(strategy=StrategyName.RANDOM, generated_from=first_of(0), schedules=_SCHEDULES)
    report = _search(race, plan)
    if report.findings:
        return f"schedule {report.schedules} with events"
    return _by_its_schedule(race)


def _by_its_schedule(race: Race) -> str:
    """Run the schedule of one of this engine's mutants that no search has found."""
    schedule = mutant_named(race.mutant).schedule if race.adapter == DEFAULT_ADAPTER else ""
    if not schedule:
        return _NOT_SHOWN
    with switched_on(adapter_named(race.adapter), race.mutant):
        return "its schedule alone" if execute(Schedule.parse(schedule)).failure is not None else _NOT_SHOWN


def _by_the_release(race: Race) -> str:
    adapter = adapter_named(race.adapter)
    (defect,) = (one for one in defects_of(race.adapter) if one.id == race.defect)
    version = f"{race.adapter} {adapter.version()}" if isinstance(adapter, SchedulerAdapter) else race.adapter
    fails = any(execute(Schedule.parse(text)).failure is not None for text in defect.schedules)
    return f"its schedule, on {version}" if fails else _NOT_SHOWN


def _by_a_sweep(race: Race) -> str:
    """Compare the sweeps of the workload with the mutant and without it: the release may have defects of its own."""
    plan = SearchPlan(targets=(race.workload,), adapter=race.adapter)
    with_it = Campaign(msgspec.structs.replace(plan, mutant=race.mutant)).run()
    known = {one.failure.signature for one in Campaign(plan).run().findings.values()}
    is_shown = any(one.failure.signature not in known for one in with_it.findings.values())
    return f"the sweep of `{race.workload}`" if is_shown else _NOT_SHOWN


def _search(race: Race, plan: SearchPlan) -> SearchReport:
    target_adapter = adapter_of(race.mutant, race.adapter)
    return Campaign(msgspec.structs.replace(plan, mutant=race.mutant, adapter=target_adapter, stop_at_first=True)).run()


def _first_target(race: Race) -> int | None:
    """Return how many generated targets it takes to show a mutant; None if none that was tried does."""
    target_adapter = adapter_of(race.mutant, race.adapter)
    for number in range(_TARGETS):
        target = generated_schedule(number, target_adapter)
        with switched_on(adapter_named(race.adapter), race.mutant):
            failure = execute(target).failure
        if failure is not None and execute(target).failure is None:
            return number + 1
    return None


def shown_on(page: Path) -> dict[tuple[str, str], str]:
    """Read the last column of a page, by report and race."""
    lines = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    return {(row[0], row[1]): row[-1] for row in rows if len(row) == len(_HEADS)}


def page_of(races: list[Race], shown: Mapping[tuple[str, str], str]) -> str:
    """Format the page."""
    count = sum(shown.get((race.report, race.what), _NOT_SHOWN) != _NOT_SHOWN for race in races)
    about = (
        "Races that trackers of engines reported in 2026, as mutants of this engine and of others, as defects of a "
        f"release, or why there is neither. `python -m benchmarks.fresh_races` runs generated targets, at most "
        f"{_TARGETS}, then a random search of {_SCHEDULES:,} schedules with added events, or the sweep of a workload, "
        "and writes this page from `benchmarks/fresh_races.toml`. In an environment with vLLM or SGLang it does so for "
        f"theirs. {count} of {len(races)} are shown."
    )
    rows = [f"| {' | '.join(_HEADS)} |", "| --- " * len(_HEADS) + "|"]
    for race in races:
        by = shown.get((race.report, race.what), _NOT_SHOWN)
        rows.append(f"| {race.report} | {race.what} | {race.shown_as} | {by} |")
    return "\n".join(["# Races of 2026", "", *textwrap.wrap(about, _COLUMNS), "", *rows, ""])


def _searched(races: list[Race], names: list[str]) -> Iterator[tuple[Race, str]]:
    """Yield the rows that can be searched for here, each with its result."""
    for race in races:
        if names and not {race.adapter, race.mutant, race.defect}.intersection(names):
            continue
        try:
            found = how_shown(race)
        except (ScriptDefinitionError, ImportError) as exc:
            print(f"{race.report}: left as it was: {exc}", flush=True)  # noqa: T201
            continue
        print(f"{race.report}: {race.shown_as}: {found}", flush=True)  # noqa: T201
        yield race, found


def main() -> None:
    """Search for the rows of the table and write its page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="*", help="search only for the rows of these adapters, mutants and defects")
    parser.add_argument("--page", type=Path, default=_PAGE)
    options = parser.parse_args()
    races, shown = read_races(), shown_on(options.page)
    for race, found in _searched(races, options.name):
        shown[race.report, race.what] = found
        options.page.write_text(page_of(races, shown), encoding="utf-8")
    options.page.write_text(page_of(races, shown), encoding="utf-8")


if __name__ == "__main__":
    with interruptible("benchmarks"):
        main()
