"""The exhaustive search: so many extra events at every step, of every kind, at every target: all runs of that kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of

DEFAULT_WINDOW_STEPS = 2


class Exhaustive:
    """Every ``events`` extra events, each at most ``window_steps`` after the one before it.

    Bound: all runs of that form, so what passes is free of every bug that they show.
    """

    complete = True

    def __init__(self, events: int = 1, *, window_steps: int = DEFAULT_WINDOW_STEPS) -> None:
        self._events = events
        self._window_steps = window_steps

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """Steps outside, kinds inside, first events outside, so that runs that begin alike come together."""
        del name
        return itertools.islice(self._all(extras_of(base), 1, steps, self._events), first, None)

    def _all(self, extras: tuple[Action, ...], first: int, last: int, events: int) -> Iterator[tuple[Placed, ...]]:
        for step in range(first, last + 1):
            for action in extras:
                here = Placed(step, action)
                if events == 1:
                    yield (here,)
                else:
                    for later in self._all(extras, step, step + self._window_steps, events - 1):
                        yield (here, *later)
