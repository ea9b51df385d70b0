"""Random events: many at once, anywhere, from a seed. For long campaigns, where completeness is out of reach."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of

__all__ = ["RandomEvents"]

DEFAULT_MOST_EVENTS = 12
# Events may come after the workload's own end: earlier ones make it longer.
_LATE_STEPS = 10


class RandomEvents:
    """Up to ``most_events`` extra events a run."""

    complete = False

    def __init__(self, seed: int, *, most_events: int = DEFAULT_MOST_EVENTS) -> None:
        self._seed = seed
        self._most_events = most_events

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """Endless; run ``i`` depends on the seed, the workload and ``i`` alone."""
        extras = (*extras_of(base), *base.adapter.undoing)
        for run in itertools.count(first):
            rng = random.Random(f"{self._seed}/{name}/{run}")  # noqa: S311 - the same from the same seed
            count = rng.randint(1, self._most_events)
            drawn = [Placed(rng.randint(1, steps + _LATE_STEPS), rng.choice(extras)) for _ in range(count)]
            yield tuple(sorted(drawn, key=lambda placed: placed.step))
