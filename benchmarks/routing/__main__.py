"""``python -m benchmarks.routing``: routing policies side by side, over simulated replicas in virtual time.

A table at one rate, and with ``--svg`` a plot over several; without ``--policies`` names, the plot alone. Everything
follows from ``--seed``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Final

from rich.console import Console
from rich.table import Table

from benchmarks.measurement import output_file
from benchmarks.routing.plot import Line, Panel, figure
from benchmarks.routing.policies import POLICIES
from benchmarks.routing.simulation import Outcome, ReplicaModel, simulate
from benchmarks.routing.workload import Workload, conversations
from lockstep.interruption import interruptible

RATES: Final = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)
PLOT_REPLICAS: Final = 250
PLOT_REQUESTS: Final = 100_000
PLOTTED: Final = ("round-robin", "two choices", "prefix, no bound", "prefix")
COLUMNS: Final = ("policy", "hit rate", "imbalance", "p50", "p99")


def main() -> None:
    """Print the table; draw the plot if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing", description=__doc__)
    parser.add_argument("--replicas", type=int, default=1000, help="replicas of the table")
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of the table")
    parser.add_argument("--rate", type=float, default=4.0, help="requests a second and replica, of the table")
    parser.add_argument("--policies", nargs="*", choices=tuple(POLICIES), default=tuple(POLICIES))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--svg", type=output_file, help="where to draw the plot")
    parser.add_argument("--markdown", action="store_true", help="print the table for a page of the docs")
    arguments = parser.parse_args()
    if arguments.policies:
        _show_table(arguments)
    if arguments.svg is not None:
        arguments.svg.write_text(_plot(arguments.seed))


def _show_table(arguments: argparse.Namespace) -> None:
    begun = time.process_time()
    outcomes = {
        name: _run(name, arguments.replicas, arguments.requests, arguments.rate, arguments.seed)
        for name in arguments.policies
    }
    seconds = (time.process_time() - begun) / len(outcomes)
    rows = [_row(name, outcome) for name, outcome in outcomes.items()]
    if arguments.markdown:
        print(_markdown(rows))  # noqa: T201 - what was asked for
        return
    table = Table(
        title=f"{arguments.requests:,} requests to {arguments.replicas:,} replicas, {arguments.rate:g} a second and "
        f"replica; {seconds:.0f} s of CPU time a policy"
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def _run(policy: str, replicas: int, requests: int, rate: float, seed: int) -> Outcome:
    model = ReplicaModel()
    talk = conversations(Workload(), rate * replicas, seed)
    return simulate(
        POLICIES[policy](replicas, model.cache_chunks, seed), talk, replicas=replicas, requests=requests, model=model
    )


def _row(name: str, outcome: Outcome) -> tuple[str, ...]:
    hit, imbalance = f"{outcome.hit_rate:.1%}", f"{outcome.mean_imbalance:.2f}"
    return name, hit, imbalance, f"{outcome.p50_s * 1000:,.0f} ms", f"{outcome.p99_s * 1000:,.0f} ms"


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [COLUMNS, ["---", *["---:"] * (len(COLUMNS) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _plot(seed: int) -> str:
    """The plot: hit rate, imbalance and the slowest first tokens, over the rate."""
    runs = {name: [_run(name, PLOT_REPLICAS, PLOT_REQUESTS, rate, seed) for rate in RATES] for name in PLOTTED}

    def lines(of: str, scale: float = 1.0) -> list[Line]:
        return [Line(name, [getattr(outcome, of) * scale for outcome in row]) for name, row in runs.items()]

    panels = (
        Panel(
            title="Prompt tokens cached, %",
            lines=lines("hit_rate", 100),
            lowest=0,
            highest=100,
            ticks=range(0, 101, 20),
        ),
        Panel(title="Open requests, max / mean", lines=lines("mean_imbalance"), lowest=1, highest=6, ticks=range(1, 7)),
        Panel(
            title="p99 to the first token, s",
            lines=lines("p99_s"),
            lowest=0.1,
            highest=100,
            ticks=(0.1, 1, 10, 100),
            logarithmic=True,
        ),
    )
    return figure(RATES, "requests a second and replica", panels, "Routing policies compared over the request rate")


if __name__ == "__main__":
    with interruptible("benchmarks.routing"):
        main()
