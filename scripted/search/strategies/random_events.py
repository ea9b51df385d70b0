"""Random events: many at once, anywhere, from a seed. For long campaigns, where completeness is out of reach."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from typing import Final

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of
from scripted.search.strategies.base import mostly_survivable

DEFAULT_MOST_EVENTS = 12
# Events may come after the workload's own end: earlier ones make it longer.
_LATE_STEPS = 10
# The share of events that are drawn from those that have something to act on in the workload by itself.
_ACTING: Final = 0.8


class RandomEvents:
    """Up to ``most_events`` extra events a run, each of any kind at any step; most where they have something to act on.

    Bound: each run of k such events that are not fatal has at least the probability
    (1 / most_events) * (1 / (5 * steps * kinds)) ** k; one with a fatal one an eighth of that, and one with
    events after the end of the workload a third.
    """

    complete = False

    def __init__(self, seed: int, *, most_events: int = DEFAULT_MOST_EVENTS) -> None:
        self._seed = seed
        self._most_events = most_events

    def additions(
        self, name: str, base: Schedule, steps: int, *, first: int = 0, acting: Sequence[Collection[Action]] = ()
    ) -> Iterator[tuple[Placed, ...]]:
        """Endless; run ``i`` depends on the seed, the workload and ``i`` alone."""
        drawing = Drawing(base, steps, acting)
        for run in itertools.count(first):
            rng = random.Random(f"{self._seed}/{name}/{run}")  # noqa: S311 - the same from the same seed
            yield drawing.events(rng, self._drawn_from(rng, drawing), self._most_events)

    def _drawn_from(self, rng: random.Random, drawing: Drawing) -> Sequence[Action]:
        return drawing.extras(rng)


class Swarm(RandomEvents):
    """Each run draws from half of the kinds, chosen by a coin for each.

    Groce et al., Swarm Testing, ISSTA 2012: what one kind hides, such as a flush that empties what an eviction would
    meet, is absent from half of the runs. Bound: runs that need j kinds and none of i others are 1 / 2 ** (i + j) of
    all, whatever else there is.
    """

    def _drawn_from(self, rng: random.Random, drawing: Drawing) -> Sequence[Action]:
        return drawing.kinds(rng)


class Drawing:
    """What is drawn from for one workload of so many steps.

    ``acting`` are the events that would have something to act on, before each step of the workload by itself.
    """

    def __init__(self, base: Schedule, steps: int, acting: Sequence[Collection[Action]]) -> None:
        self.steps = steps
        self._undoing = base.adapter.undoing
        self._extras = (*extras_of(base), *self._undoing)
        self._acting = acting

    def extras(self, rng: random.Random) -> Sequence[Action]:
        """Everything; in most runs without what is fatal."""
        return mostly_survivable(rng, self._extras)

    def kinds(self, rng: random.Random) -> Sequence[Action]:
        """The events of half of the kinds; of all when none of them is chosen."""
        extras = self.extras(rng)
        kinds = {kind for kind in dict.fromkeys(action.kind for action in extras) if rng.random() < 0.5}
        return [action for action in extras if action.kind in kinds] or extras

    def events(self, rng: random.Random, extras: Sequence[Action], most: int) -> tuple[Placed, ...]:
        """One to ``most`` of these events, in the order of their steps."""
        last = self.steps + rng.choice((0, 0, _LATE_STEPS))
        steps = sorted(rng.randint(1, last) for _ in range(rng.randint(1, most)))
        return tuple(self.event(rng, extras, step, may_undo=bool(number)) for number, step in enumerate(steps))

    def event(self, rng: random.Random, extras: Sequence[Action], step: int, *, may_undo: bool) -> Placed:
        """One of them, before this step. ``may_undo``: something was added that it may undo."""
        here = extras
        if step <= len(self._acting) and rng.random() < _ACTING:
            acting = self._acting[step - 1]
            here = [one for one in extras if one in acting or (may_undo and one in self._undoing)] or extras
        return Placed(step, rng.choice(here))
