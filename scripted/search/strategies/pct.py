"""PCT: actors with random priorities, which change at a few random points, decide who goes next.

Burckhardt et al., A Randomized Scheduler with Probabilistic Guarantees of Finding Bugs, ASPLOS 2010.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of
from scripted.search.strategies.actors import PIPELINE, acting_in_turn, draw_actors

DEFAULT_DEPTH = 3


class Pct:
    """``depth`` counts the orderings that matter: one priority change fewer is made in each run.

    Bound: once the actors are drawn, a bug of that depth is hit with a probability of at least 1 / (n * k ** (depth -
    1)), for n actors and k steps.
    """

    complete = False

    def __init__(self, seed: int, *, depth: int = DEFAULT_DEPTH) -> None:
        self._seed = seed
        self._depth = depth

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """Endless; run ``i`` depends on the seed, the workload and ``i`` alone."""
        extras = extras_of(base)
        for run in itertools.count(first):
            rng = random.Random(f"{self._seed}/{name}/{run}")  # noqa: S311 - the same from the same seed
            actors = draw_actors(rng, extras)
            yield acting_in_turn(actors, self._turns(rng, [len(actions) for actions in actors], steps))

    def _turns(self, rng: random.Random, left: list[int], steps: int) -> Iterator[int]:
        """The actor of the highest priority that has something left; the pipeline always has."""
        order = [*range(len(left)), PIPELINE]
        rng.shuffle(order)
        changes = set(rng.sample(range(2, steps + 2), min(self._depth - 1, steps)))
        for step in range(1, steps + 1):
            if step in changes:
                order.append(order.pop(0))
            actor = next(actor for actor in order if actor == PIPELINE or left[actor])
            if actor != PIPELINE:
                left[actor] -= 1
            yield actor
