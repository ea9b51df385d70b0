"""Random events: many at once, anywhere, from a seed. For long campaigns, where completeness is out of reach."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of

__all__ = ["RandomEvents", "Swarm", "draw_events", "draw_kinds"]

DEFAULT_MOST_EVENTS = 12
# Events may come after the workload's own end: earlier ones make it longer.
_LATE_STEPS = 10


class RandomEvents:
    """Up to ``most_events`` extra events a run, each of any kind at any step.

    Bound: each run of k such events has the probability (1 / most_events) * (1 / (steps * kinds)) ** k.
    """

    complete = False

    def __init__(self, seed: int, *, most_events: int = DEFAULT_MOST_EVENTS) -> None:
        self._seed = seed
        self._most_events = most_events

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """Endless; run ``i`` depends on the seed, the workload and ``i`` alone."""
        extras = (*extras_of(base), *base.adapter.undoing)
        for run in itertools.count(first):
            rng = random.Random(f"{self._seed}/{name}/{run}")  # noqa: S311 - the same from the same seed
            yield draw_events(rng, self._drawn_from(rng, extras), steps, self._most_events)

    def _drawn_from(self, rng: random.Random, extras: Sequence[Action]) -> Sequence[Action]:
        del rng
        return extras


class Swarm(RandomEvents):
    """Each run draws from half of the kinds, chosen by a coin for each.

    Groce et al., Swarm Testing, ISSTA 2012: what one kind hides, such as a flush that empties what an eviction would
    meet, is absent from half of the runs. Bound: runs that need j kinds and none of i others are 1 / 2 ** (i + j) of
    all, whatever else there is.
    """

    def _drawn_from(self, rng: random.Random, extras: Sequence[Action]) -> Sequence[Action]:
        return draw_kinds(rng, extras)


def draw_kinds(rng: random.Random, extras: Sequence[Action]) -> Sequence[Action]:
    """The events of half of the kinds; of all when none of them is chosen."""
    kinds = {kind for kind in dict.fromkeys(action.kind for action in extras) if rng.random() < 0.5}
    return [action for action in extras if action.kind in kinds] or extras


def draw_events(rng: random.Random, extras: Sequence[Action], steps: int, most: int) -> tuple[Placed, ...]:
    """One to ``most`` of these events, in the order of their steps."""
    count = rng.randint(1, most)
    drawn = [Placed(rng.randint(1, steps + _LATE_STEPS), rng.choice(extras)) for _ in range(count)]
    return tuple(sorted(drawn, key=lambda placed: placed.step))
