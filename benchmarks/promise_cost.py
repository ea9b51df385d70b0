"""The cost of each promise: ``python -m benchmarks.promise_cost [--adapter NAME] [--schedules N]``.

One search of generated targets, with a clock of CPU time around each call of a promise's checks; the clock's own time
is measured and taken off. Copies of a promise's state in forks, and the choice of a machine's promises, are not
counted.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Final, NamedTuple, ParamSpec, TypeVar
from unittest.mock import patch

import msgspec
from rich.table import Table

import scripted.core.run as runs
from benchmarks.machine import print_with_machine
from lockstep.interruption import interruptible
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.promises.liveness import Liveness
from scripted.core.promises.waste import EmptySteps, Preemptions
from scripted.core.run import Run
from scripted.search.campaign import Campaign
from scripted.search.generated import first_of
from scripted.search.strategies import StrategyName
from scripted.search.units import SearchPlan

__all__ = ["Clock", "main", "measure"]

_P = ParamSpec("_P")
_T = TypeVar("_T")
_SCHEDULES: Final = 1_000
_WARM_UP: Final = 10
_CALLS: Final = 100_000
# What a run calls for each promise. None of these functions calls another one.
CHECKS: Final[dict[str, tuple[tuple[object, str], ...]]] = {
    "waste": (
        *((Preemptions, name) for name in ("lose", "begin", "compute", "end")),
        (EmptySteps, "count"),
        (Run, "_check_waste"),
    ),
    "liveness": ((Liveness, "is_late"), (Liveness, "disturb"), (Run, "_check_liveness")),
    "timers": ((Run, "_check_polls"),),
    "told ends": ((runs, "check_told"),),
    "asked twice": ((runs, "check_queries"),),
    "cached prefixes": ((runs, "check_prefixes"),),
    "windows": ((Run, "_look_through_windows"),),
}


class Clock:
    """Adds up the seconds and calls of each promise's checks."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls = Counter[str]()

    def around(self, promise: str, check: Callable[_P, _T]) -> Callable[_P, _T]:
        """Return this check with the clock around each call, also one that raises."""

        @functools.wraps(check)
        def timed(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            began = time.thread_time()
            try:
                return check(*args, **kwargs)
            finally:
                self.seconds[promise] += time.thread_time() - began
                self.calls[promise] += 1

        return timed


@contextmanager
def clocked(clock: Clock) -> Iterator[None]:
    """Put the clock around the checks of every promise."""
    with ExitStack() as undo:
        for promise, places in CHECKS.items():
            for owner, name in places:
                undo.enter_context(patch.object(owner, name, clock.around(promise, vars(owner)[name])))
        yield


class Own(NamedTuple):
    """The clock's own time for one call, in seconds: the part ``inside`` that it counts, and the ``whole`` of it."""

    inside: float
    whole: float


def _own_time() -> Own:
    clock = Clock()

    def nothing() -> None: ...

    timed = clock.around("", nothing)
    began = time.thread_time()
    for _ in range(_CALLS):
        nothing()
    between = time.thread_time()
    for _ in range(_CALLS):
        timed()
    whole = time.thread_time() - between - (between - began)
    return Own((clock.seconds[""] - (between - began)) / _CALLS, whole / _CALLS)


class Cost(NamedTuple):
    """A promise's calls in a schedule, and its percentage of a schedule's time."""

    promise: str
    calls: float
    percent: float


def measure(adapter: str, schedules: int, seed: int = 0) -> tuple[float, list[Cost]]:
    """Return the milliseconds of a schedule and each promise's part of them."""
    clock = Clock()
    plan = SearchPlan(
        adapter=adapter, schedules=schedules, strategy=StrategyName.RANDOM, seed=seed, generated_from=first_of(seed)
    )
    # The first runs import the scheduler.
    Campaign(msgspec.structs.replace(plan, schedules=_WARM_UP)).run()
    with clocked(clock):
        began = time.thread_time()
        done = Campaign(plan).run().schedules
        seconds = time.thread_time() - began
    own = _own_time()
    seconds -= own.whole * clock.calls.total()
    costs = [
        Cost(name, clock.calls[name] / done, 100 * (clock.seconds[name] - own.inside * clock.calls[name]) / seconds)
        for name in CHECKS
    ]
    return 1000 * seconds / done, costs


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", default=DEFAULT_ADAPTER)
    parser.add_argument("--schedules", type=int, default=_SCHEDULES)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    took_ms, costs = measure(options.adapter, options.schedules, options.seed)
    table = Table(title=f"{options.adapter}: {options.schedules:,} schedules of {took_ms:.2f} ms", title_justify="left")
    for column in ("promise", "calls a schedule", "of its time, %"):
        table.add_column(column, justify="left" if column == "promise" else "right")
    for cost in costs:
        table.add_row(cost.promise, f"{cost.calls:.1f}", f"{cost.percent:.2f}")
    table.add_row("all", f"{sum(cost.calls for cost in costs):.1f}", f"{sum(cost.percent for cost in costs):.2f}")
    print_with_machine(table)


if __name__ == "__main__":
    with interruptible("benchmarks.promise_cost"):
        main()
