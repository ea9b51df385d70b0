"""An hour of search over fleets: ``python -m benchmarks.fleet_search --page FILE [--minutes N]``.

Generated targets of one prefill and one decode engine, and of two and two, with random events and with swarm, in slices
that take turns. A slice is kept as soon as it is done, so the command resumes where it was stopped. Time is process
time.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec

from lockstep.interruption import interruptible
from scripted.search.strategies import StrategyName
from scripted.search.targets import schedule_of
from scripted.search.units import SearchPlan, Unit, run_unit

__all__ = ["main"]

ADAPTER: Final = "lockstep-fleet"
SHAPES: Final = ("p0,d0", "p0,p1,d0,d1")
STRATEGIES: Final = (StrategyName.RANDOM, StrategyName.SWARM)
MINUTES: Final = 60.0
_SLICE_S: Final = 60.0
# Each target runs by itself and once with events, as in a campaign.
_RUNS: Final = 2


class Slice(msgspec.Struct, frozen=True, kw_only=True):
    """Targets of one shape, numbered from ``first`` to before ``end``; ``cpu_s`` is their process time."""

    engines: str
    strategy: str
    first: int
    end: int
    targets: int
    schedules: int
    cpu_s: float
    findings: tuple[str, ...] = ()


def main() -> None:
    """Search and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", type=Path, required=True, help="the page whose table is written again")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="process time over all runs of the command")
    options = parser.parse_args()
    kept = options.page.with_suffix(".jsonl")
    done = [msgspec.json.decode(line, type=Slice) for line in kept.read_bytes().splitlines()] if kept.exists() else []
    cells = [(engines, strategy) for engines in SHAPES for strategy in STRATEGIES]
    while (left_s := options.minutes * 60 - sum(one.cpu_s for one in done)) > 0:
        counts = {cell: sum(one.cpu_s for one in done if (one.engines, one.strategy) == cell) for cell in cells}
        engines, strategy = min(cells, key=lambda cell: counts[cell])
        ends = [one.end for one in done if (one.engines, one.strategy) == (engines, strategy)]
        done.append(_search(engines, strategy, max(ends, default=0), min(left_s, _SLICE_S)))
        with kept.open("ab") as file:
            file.write(msgspec.json.encode(done[-1]) + b"\n")
    above = options.page.read_text(encoding="utf-8").split("| engines", maxsplit=1)[0] if options.page.exists() else ""
    options.page.write_text(above + "\n".join(_table(done)) + "\n", encoding="utf-8")


def _search(engines: str, strategy: StrategyName, first: int, seconds: float) -> Slice:
    """Run targets of this shape, at least one, until the time is over."""
    plan = SearchPlan(adapter=ADAPTER, strategy=strategy)
    targets, schedules, cpu_s, findings = 0, 0, 0.0, list[str]()
    for number in itertools.count(first):
        base = schedule_of(f"generated:{number}", ADAPTER)
        if base is None or ",".join(base.config.names) != engines:
            continue
        result = run_unit(Unit(f"generated:{number}", 0, 1, _RUNS, alone_first=True), plan)
        targets, schedules, cpu_s = targets + 1, schedules + result.schedules, cpu_s + result.cpu_s
        findings += [f"generated:{number}: {one.failure.signature}" for one in result.findings]
        if cpu_s >= seconds:
            break
    return Slice(
        engines=engines,
        strategy=strategy,
        first=first,
        end=number + 1,
        targets=targets,
        schedules=schedules,
        cpu_s=cpu_s,
        findings=tuple(findings),
    )


def _table(done: list[Slice]) -> Iterator[str]:
    yield "| engines | strategy | targets | schedules | minutes | a second and core | findings |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for engines, strategy in dict.fromkeys((one.engines, one.strategy) for one in done):
        yield _row(engines, strategy, [one for one in done if (one.engines, one.strategy) == (engines, strategy)])
    yield _row("**all**", "", done)


def _row(engines: str, strategy: str, slices: list[Slice]) -> str:
    schedules, cpu_s = sum(one.schedules for one in slices), sum(one.cpu_s for one in slices)
    findings = "<br>".join(found for one in slices for found in one.findings) or "none"
    targets = sum(one.targets for one in slices)
    rate = schedules / cpu_s
    return f"| {engines} | {strategy} | {targets:,} | {schedules:,} | {cpu_s / 60:.1f} | {rate:.0f} | {findings} |"


if __name__ == "__main__":
    with interruptible("benchmarks.fleet_search"):
        main()
