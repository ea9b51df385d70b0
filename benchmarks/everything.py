"""``python -m benchmarks``: runs all benchmarks, and prints a table and writes out/bench.json.

They run sequentially, because they share the machine's cores with the servers that they start.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from rich.console import Console

from benchmarks import gate_cost, live_loop, recording_cost, scheduler_steps, scripted_server, stage_links, tracing_cost
from benchmarks.measurement import Measurement, MeasurementReport, as_table, output_file, write_report

__all__ = ["main"]

RESULTS: Final = Path("out/bench.json")
PLAIN_WIDTH_COLUMNS: Final = 140


def main() -> None:
    """Run the named benchmarks. A missed target is shown but is no error, because the machine may be busy."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"some of {', '.join(BENCHMARKS)}; default: all")
    parser.add_argument("--json", type=output_file, default=RESULTS, help="the file for the numbers")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.names if name not in BENCHMARKS]
    if unknown:
        parser.error(f"no benchmark is called {unknown[0]!r}; there are {', '.join(BENCHMARKS)}")
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH_COLUMNS, highlight=False)
    load_before = os.getloadavg()[0]
    measurements: list[Measurement] = []
    for name in arguments.names or BENCHMARKS:
        console.print(f"measuring: {name}")
        measurements += BENCHMARKS[name]()
    report = MeasurementReport.of(measurements, load_before)
    console.print(as_table(report))
    write_report(arguments.json, report)
    console.print(f"numbers: {arguments.json}")


BENCHMARKS: Final[dict[str, Callable[[], Iterable[Measurement]]]] = {
    "steps": scheduler_steps.measure,
    "server": scripted_server.measure,
    "gate": gate_cost.measure,
    "processes": live_loop.measure,
    "recording": recording_cost.measure,
    "links": stage_links.measure,
    "tracing": tracing_cost.measure,
}
