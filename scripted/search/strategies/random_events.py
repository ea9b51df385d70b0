"""Random events: many at once, anywhere, from a seed. For long campaigns, where completeness is out of reach."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Final

from scripted.core.action import Action
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of
from scripted.search.strategies.base import Drawn, Meets, mostly_survivable

DEFAULT_MOST_EVENTS = 12
_LATE_STEPS = 10
# Half of the runs have no more than these.
_FEW_EVENTS: Final = 3
# In half of the runs the events come one close after the other: what one has begun, the next one meets.
_GAPS: Final = (0, 0, 1, 1, 2, 4)
# The share of events that are drawn until one has something to act on, and how often at most.
_ACTING: Final = 0.8
_TRIES: Final = 30


class RandomEvents:
    """Up to ``most_events`` extra events a run, each of any kind at any step; most where they have something to act on.

    Bound: each run of k such events that are not fatal has at least the probability
    (1 / (4 * most_events)) * (1 / (5 * steps * kinds)) ** k; one with a fatal one an eighth of that, and one with
    events after the end of the workload a third.
    """

    complete = False

    def __init__(self, seed: int, *, most_events: int = DEFAULT_MOST_EVENTS) -> None:
        self._seed = seed
        self._most_events = most_events

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[Drawn]:
        """Endless; run ``i`` depends on the seed, the workload and ``i`` alone."""
        every = (*extras_of(base), *base.adapter.undoing)
        for run in itertools.count(first):
            key = f"{self._seed}/{name}/{run}"
            rng = random.Random(key)  # noqa: S311 - the same from the same seed
            extras = self._drawn_from(rng, mostly_survivable(rng, every))
            # Events may come after the workload's own end: earlier ones make it longer.
            last = steps + rng.choice((0, 0, _LATE_STEPS))
            most = rng.choice((_FEW_EVENTS, self._most_events))
            at = sorted(rng.randint(1, last) for _ in range(rng.randint(1, most)))
            if rng.random() < 0.5:
                at = list(itertools.accumulate(rng.choices(_GAPS, k=len(at) - 1), initial=rng.choice(at)))
            yield Drawn(key, at, functools.partial(self._choose, rng, extras))

    def _drawn_from(self, rng: random.Random, extras: Sequence[Action]) -> Sequence[Action]:
        del rng
        return extras

    def _choose(self, rng: random.Random, extras: Sequence[Action], meets: Meets) -> Action:
        action = rng.choice(extras)
        if rng.random() < _ACTING:
            for _ in range(_TRIES):
                if meets(action) is not None:
                    break
                action = rng.choice(extras)
        return action


class Swarm(RandomEvents):
    """Each run draws from half of the kinds, chosen by a coin for each.

    Groce et al., Swarm Testing, ISSTA 2012: what one kind hides, such as a flush that empties what an eviction would
    meet, is absent from half of the runs. Bound: runs that need j kinds and none of i others are 1 / 2 ** (i + j) of
    all, whatever else there is.
    """

    def _drawn_from(self, rng: random.Random, extras: Sequence[Action]) -> Sequence[Action]:
        """The events of half of the kinds; of all when none of them is chosen."""
        kinds = {kind for kind in dict.fromkeys(action.kind for action in extras) if rng.random() < 0.5}
        return [action for action in extras if action.kind in kinds] or extras
