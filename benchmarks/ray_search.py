"""Measures a search's speed-up by Ray nodes: ``python -m benchmarks.ray_search``, on its own local cluster.

Units of the flagship's search run sequentially on one node, then two and more at once, alternating. The cluster is
warm: it has run units before. More nodes than idle cores gain nothing.
"""

from __future__ import annotations

import os
import statistics
import time
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import closing
from typing import Final

from scripted_lockstep.tiers.server.ray_cluster import LocalCluster

from lockstep.interruption import interruptible
from scripted.search.ray_pool import RayPool, ray_pool
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan, Unit, UnitResult

__all__ = ["main"]

NODES: Final = (1, 2)
ROUNDS: Final = 5
UNITS: Final = 8
SCHEDULES_A_UNIT: Final = 250
PLAN: Final = SearchPlan(targets=("chunked-alone",), strategy=StrategyName.RANDOM)


def main() -> None:
    """Measure and print."""
    rates: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    shares: dict[int, list[float]] = {nodes: [] for nodes in NODES}
    with closing(LocalCluster(max(NODES))) as cluster, ray_pool(cluster.address, max(NODES)) as pool:
        for nodes in NODES:
            _run(pool, nodes)
        for _ in range(ROUNDS):
            for nodes in NODES:
                rate, share = _run(pool, nodes)
                rates[nodes].append(rate)
                shares[nodes].append(share)
    for nodes in NODES:
        ratio = statistics.median(there / one for there, one in zip(rates[nodes], rates[1], strict=True))
        print(  # noqa: T201 - a command's answer
            f"{nodes} nodes: {statistics.median(rates[nodes]):.0f} schedules/s, {ratio:.2f} times one node (median of "
            f"{ROUNDS} rounds); {statistics.median(shares[nodes]):.0%} of a core a node; "
            f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        )


def _run(pool: RayPool, width: int) -> tuple[float, float]:
    """Measure schedules per second with ``width`` units at once, and each node's share of a core."""
    left = [Unit(PLAN.targets[0], number * SCHEDULES_A_UNIT, 1, SCHEDULES_A_UNIT) for number in range(UNITS)]
    begun, running, done = time.perf_counter(), set[Future[UnitResult]](), list[UnitResult]()
    while left or running:
        while left and len(running) < width:
            running.add(pool.submit(left.pop(), PLAN))
        ended, running = wait(running, return_when=FIRST_COMPLETED)
        done += [future.result() for future in ended]
    seconds = time.perf_counter() - begun
    return sum(one.schedules for one in done) / seconds, sum(one.cpu_s for one in done) / seconds / width


if __name__ == "__main__":
    with interruptible("benchmarks.ray_search"):
        main()
