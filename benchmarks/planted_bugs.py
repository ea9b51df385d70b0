"""Measures how soon the search finds bugs planted in vLLM and SGLang: ``python -m benchmarks.planted_bugs``.

Invented bugs are in ``planted_flights*.toml``; ``planted_bugs.toml`` and some mutants of the adapters revert commits of
the last three months. A failure of the unchanged scheduler does not count. The rows of the installed engine go into a
file of ``benchmarks/tables``, and the page shows the rows of both engines.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from lockstep.interruption import interruptible
from scripted.core.adapters import adapter_named
from scripted.core.mutant import Mutant, read_mutants
from scripted.sdk import SchedulerAdapter
from scripted.search.mutant_search import TimedSearch, measure, measured_in
from scripted.search.strategies import StrategyName

__all__ = ["Plants", "main", "page_of", "plants_of"]

_HERE: Final = Path(__file__).parent
_ADAPTERS: Final = _HERE.parent / "adapters"
_TABLES: Final = _HERE / "tables"
_FLIGHTS: Final = {"vllm": "planted_flights.toml", "sglang": "planted_flights_sglang.toml"}
# Mutants of the adapters that revert a commit of the last three months.
_PUT_BACK: Final = {
    "vllm": (
        "queued-before-it-has-left",
        "kept-up-to-what-was-computed",
        "an-image-at-the-start-is-cut",
        "the-hash-of-a-discarded-token",
    ),
    "sglang": (
        "load-without-a-fence",
        "backup-without-a-fence",
        "chunks-without-progress",
        "split-forgets-the-lock-of-the-host",
    ),
}
_CPU_S: Final = 120.0
_SCHEDULES: Final = 1_000_000
_TEXT_LIMIT: Final = 110
_COLUMNS: Final = 100


class Plants(NamedTuple):
    """The bugs planted in one engine's scheduler: invented bugs and reverted commits."""

    invented: tuple[Mutant, ...]
    reversals: tuple[Mutant, ...]

    @property
    def all(self) -> tuple[Mutant, ...]:
        return self.invented + self.reversals


def plants_of(engine: str) -> Plants:
    """Read the planted bugs of an engine, which need not be installed."""
    new = [one for one in read_mutants(_HERE / "planted_bugs.toml") if one.adapter == engine]
    of_adapter = {one.name: one for one in read_mutants(_ADAPTERS / f"scripted_{engine}" / "mutants.toml")}
    old = [of_adapter[name] for name in _PUT_BACK[engine]]
    return Plants(read_mutants(_HERE / _FLIGHTS[engine]), (*new, *old))


def page_of(measured: Mapping[str, Mapping[str, TimedSearch]]) -> str:
    """Format the page from each engine's searches, by the bug's name."""
    rows = [
        (engine, mutant, mutant in plants.reversals, measured[engine][mutant.name])
        for engine, plants in ((engine, plants_of(engine)) for engine in measured)
        for mutant in plants.all
        if mutant.name in measured[engine] and _is_over(measured[engine][mutant.name])
    ]
    judged = [(is_reversal, row) for _, _, is_reversal, row in rows if not row.misfit and not row.equivalent]
    found = [(is_reversal, row) for is_reversal, row in judged if row.is_found]
    middle = statistics.median(row.cpu_s for _, row in found or judged)
    back = sum(is_reversal for is_reversal, _ in judged)
    unjudged = len(rows) - len(judged)
    others = f" Rows of bugs that fit nowhere or change nothing are not counted: {unjudged}." if unjudged else ""
    about = (
        "Bugs planted in the schedulers of vLLM 0.33.0 and SGLang 0.5.23, and how soon a search of generated targets "
        f"with random events finds each, with one seed and at most {_CPU_S:.0f} s of process time. {len(found)} of "
        f"the {len(judged)} that were searched for are found, with a median of {middle:.1f} s; of the {back} among "
        f"them that take back a commit of the last three months, {sum(is_reversal for is_reversal, _ in found)}."
        f"{others} "
        "SGLang's rows were measured before its targets had requests with priorities. "
        "`python -m benchmarks.planted_bugs` adds the rows that are missing for the installed engine."
    )
    heads = ["| engine | bug | takes back | schedules | s | failure |", "| --- | --- | --- | ---: | ---: | --- |"]
    return "\n".join(
        ["# Planted bugs", "", *textwrap.wrap(about, _COLUMNS), "", *heads, *(_line(*row) for row in rows), ""]
    )


def _is_over(row: TimedSearch) -> bool:
    """Return whether a search succeeded or used up its time."""
    return row.is_found or bool(row.misfit) or (row.cpu_bound_s or 0.0) >= _CPU_S


def _line(engine: str, mutant: Mutant, is_reversal: bool, row: TimedSearch) -> str:
    said = row.misfit or row.equivalent or (row.failure if row.is_found else "not found")
    said = said.replace("|", "/").replace("\n", " ")
    said = said if len(said) <= _TEXT_LIMIT else f"{said[:_TEXT_LIMIT]}..."
    origin = mutant.origin if is_reversal else ""
    return f"| {engine} | `{mutant.name}`: {mutant.bug} | {origin} | {row.schedules:,} | {row.cpu_s:.1f} | {said} |"


def _file(engine: str) -> Path:
    return _TABLES / f"planted_{engine}.jsonl"


def _write_page() -> None:
    measured = {engine: {row.mutant: row for row in measured_in(_file(engine))} for engine in _FLIGHTS}
    (_TABLES / "planted_bugs.md").write_text(page_of(measured), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Search for those bugs of an engine that its file lacks, and print their rows."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planted_bugs", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="planted bugs; default: all")
    parser.add_argument("--adapter", choices=tuple(_FLIGHTS), default="vllm")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--cpu-seconds", type=float, default=_CPU_S, help="process time for each bug (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    adapter, plants = adapter_named(options.adapter), plants_of(options.adapter)
    assert isinstance(adapter, SchedulerAdapter)
    adapter.mutants = {**adapter.mutants, **{one.name: one for one in plants.all}}
    measure(
        _file(options.adapter),
        options.names or [one.name for one in plants.all],
        [StrategyName.RANDOM],
        [options.seed],
        schedules=_SCHEDULES,
        cpu_seconds=options.cpu_seconds,
        of=options.adapter,
        watch=lambda row: print(row, flush=True),  # noqa: T201
    )
    _write_page()
    return 0


if __name__ == "__main__":
    with interruptible("benchmarks.planted_bugs"):
        sys.exit(main())
