"""Measures how soon the search finds the planted bugs of ``examples/engines``, one engine of each make.

``python -m benchmarks.engine_makes [--page benchmarks/tables/engine_makes.md]``. The searches draw targets and events
from three seeds; the first finding is shrunk.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from lockstep.interruption import interruptible
from scripted.core.adapters import adapter_named
from scripted.core.mutant import mutant_names_of, switched_on
from scripted.search.campaign import Campaign, SearchReport
from scripted.search.generated import first_of
from scripted.search.shrinking import shrink
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

__all__ = ["MAKES", "found", "main", "rows"]

SEEDS: Final = (0, 1, 2)
SCHEDULES: Final = 1000

_FOLDER: Final = Path("examples/engines")
# The adapters of the folder, and how their engines are made.
MAKES: Final = {
    "inside": "computes inside `step()`",
    "two_passes": "two forward passes a step",
    "runner_kv": "KV owned by the runner",
    "condition": "a worker thread at a condition variable",
    "blocking_queue": "a thread behind a blocking queue",
    "polling": "a thread that polls",
    "asyncio_loop": "an asyncio loop",
    "waves": "data-parallel ranks with waves and a coordinator",
    "synced": "data-parallel ranks in step",
    "window_pool": "two memory pools",
}


def found(mutant: str, adapter: str, seed: int) -> SearchReport:
    """Search generated targets for a planted bug, up to the first failure."""
    return Campaign(
        SearchPlan(
            strategy=StrategyName.RANDOM,
            generated_from=first_of(seed),
            seed=seed,
            schedules=SCHEDULES,
            mutant=mutant,
            stop_at_first=True,
            adapter=adapter,
        )
    ).run()


def rows() -> Iterator[str]:
    """Yield a row for each planted bug."""
    for stem, make in MAKES.items():
        path = _FOLDER / f"{stem}.py"
        lines = len(path.read_text(encoding="utf-8").splitlines())
        adapter = adapter_named(str(path))
        for mutant in mutant_names_of(adapter):
            reports = [found(mutant, str(path), seed) for seed in SEEDS]
            counts = ", ".join(f"{report.schedules}" if report.findings else "-" for report in reports)
            finding = next((one for report in reports for one in report.findings.values()), None)
            events = "-"
            if finding is not None and finding.schedule is not None:
                with switched_on(adapter, mutant):
                    events = str(len(shrink(finding.schedule, finding.failure.signature).schedule.placed))
            yield f"| {make} | `{stem}.py`, {lines} | {mutant} | {counts} | {events} |"


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--page", type=Path, help="the page whose table is written again; the text above the table stays"
    )
    options = parser.parse_args()
    heads = ("engine", "adapter, lines", "planted bug", "schedules until found, of seeds 0, 1, 2", "events when shrunk")
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for row in rows():
        print(row, flush=True)  # noqa: T201
        lines.append(row)
    if options.page is not None:
        above = options.page.read_text(encoding="utf-8").split("| ", maxsplit=1)[0] if options.page.exists() else ""
        options.page.write_text(above + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    with interruptible("benchmarks.engine_makes"):
        main()
