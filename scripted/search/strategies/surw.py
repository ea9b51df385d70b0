"""SURW: every order of the added events and the results is equally likely.

A random walk that picks the next actor uniformly favours orders in which one ends early; this one weighs each actor by
what it has left. Zhao et al., Selectively Uniform Concurrency Testing, ASPLOS 2025. The events that it selects are the
added ones and the results.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of
from scripted.search.strategies.actors import PIPELINE, acting_in_turn, draw_actors


class Surw:
    """Bound: once the actors are drawn, each order of k events among n steps has the probability 1 / (n choose k) with
    one actor, and one over the multinomial coefficient of their numbers with several.
    """  # fmt: skip

    complete = False

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """Endless; run ``i`` depends on the seed, the workload and ``i`` alone."""
        extras = extras_of(base)
        for run in itertools.count(first):
            rng = random.Random(f"{self._seed}/{name}/{run}")  # noqa: S311 - the same from the same seed
            actors = draw_actors(rng, extras)
            turns = [actor for actor, actions in enumerate(actors) for _ in actions]
            turns += [PIPELINE] * (steps - len(turns))
            # To draw in proportion to what is left is to shuffle all of it.
            rng.shuffle(turns)
            yield acting_in_turn(actors, turns)
