"""PCT-style schedules: actors with random priorities, which change at a few random points, decide who goes next.

The actors are the pipeline, which returns results one by one, and all who do something to the engine. A bug
that needs ``d`` orderings is hit with a probability that depends on ``d``, not on the length of the run (Burckhardt et
al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, 2010).
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from scripted.core.action import Action
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of

__all__ = ["Pct"]

DEFAULT_DEPTH = 3
_MOST_ACTORS = 4
_MOST_ACTIONS = 3


class Pct:
    """``depth`` counts the orderings that matter: one priority change fewer is made in each run."""

    complete = False

    def __init__(self, seed: int, *, depth: int = DEFAULT_DEPTH) -> None:
        self._seed = seed
        self._depth = depth

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """Endless; run ``i`` depends on the seed, the workload and ``i`` alone."""
        extras = extras_of(base)
        for run in itertools.count(first):
            rng = random.Random(f"{self._seed}/{name}/{run}")  # noqa: S311 - the same from the same seed
            actors = [
                [rng.choice(extras) for _ in range(rng.randint(1, _MOST_ACTIONS))]
                for _ in range(rng.randint(1, _MOST_ACTORS))
            ]
            yield self._run(rng, actors, steps)

    def _run(self, rng: random.Random, actors: list[list[Action]], steps: int) -> tuple[Placed, ...]:
        """One action a step by the actor of the highest priority; the pipeline is the last one and is never done."""
        order = [*range(len(actors)), _PIPELINE]
        rng.shuffle(order)
        changes = set(rng.sample(range(2, steps + 2), min(self._depth - 1, steps)))
        placed = [Placed(1, HoldResults())]
        for step in range(1, steps + 1):
            if step in changes:
                order.append(order.pop(0))
            actor = next(actor for actor in order if actor == _PIPELINE or actors[actor])
            placed.append(Placed(step, ReleaseResults(count=1) if actor == _PIPELINE else actors[actor].pop(0)))
        return tuple(placed)


_PIPELINE = -1
