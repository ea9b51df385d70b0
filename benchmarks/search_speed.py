"""Measures schedules per second: ``python -m benchmarks.search_speed [--generated STRATEGY] [--against CHECKOUT]``.

Runs all workloads with single added events, spread over each sweep, in a campaign's units; or generated targets. Time
is process time. Another checkout of this repository alternates with this one, so that other load slows both down.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from lockstep.interruption import interruptible

__all__ = ["main"]

ROUNDS: Final = 3
UNITS: Final = 4
SCHEDULES_A_UNIT: Final = 30
GENERATED_SCHEDULES: Final = 500
# A program for both checkouts; each round is a new process.
_ROUND: Final = """
import sys, time
from scripted.core.adapters import adapter_named
from scripted.search.units import SearchPlan, Unit, run_unit
units, size = map(int, sys.argv[1:])
targets = tuple(adapter_named("lockstep").workloads)
plan = SearchPlan(targets=targets)
began, done = time.process_time(), 0
for unit in range(units):
    for target in targets:
        parts = 4 + unit
        done += run_unit(Unit(target, unit, parts, size), plan).schedules
print(done, time.process_time() - began)
"""
_GENERATED_ROUND: Final = """
import sys, time
from scripted.core.adapters import adapter_named
from scripted.search.campaign import Campaign
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan
adapter_named("lockstep")
plan = SearchPlan(strategy=StrategyName(sys.argv[1]), schedules=int(sys.argv[2]))
began = time.process_time()
done = Campaign(plan).run().schedules
print(done, time.process_time() - began)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, measured alternately")
    parser.add_argument("--generated", metavar="STRATEGY", help="search generated targets with this strategy")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    program = ["-c", _ROUND, str(UNITS), str(SCHEDULES_A_UNIT)]
    if options.generated:
        program = ["-c", _GENERATED_ROUND, options.generated, str(GENERATED_SCHEDULES)]
    folders = [Path.cwd(), *([options.against] if options.against else [])]
    rates: dict[Path, list[float]] = {folder: [] for folder in folders}
    for _ in range(options.rounds):
        for folder in folders:
            rates[folder].append(_rate(folder, program))
    for folder in folders:
        print(  # noqa: T201 - a command's answer
            f"{folder.name}: {statistics.median(rates[folder]):.0f} schedules/s and core, median of {options.rounds} "
            f"({min(rates[folder]):.0f} to {max(rates[folder]):.0f}); load {os.getloadavg()[0]:.1f} on "
            f"{os.cpu_count()} cores"
        )


def _rate(folder: Path, program: Sequence[str]) -> float:
    """Return the schedules per second of process time in one round of the checkout in this folder."""
    command = [sys.executable, *program]
    path = os.pathsep.join([str(folder.resolve()), str(folder.resolve() / "adapters")])
    environment = os.environ | {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    said = subprocess.run(command, check=True, capture_output=True, text=True, cwd=folder, env=environment)  # noqa: S603
    schedules, seconds = map(float, said.stdout.split())
    return schedules / seconds


if __name__ == "__main__":
    with interruptible("benchmarks.search_speed"):
        main()
