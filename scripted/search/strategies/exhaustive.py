"""The exhaustive search: one extra event at every step, of every kind, at every target: all runs of that kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of

__all__ = ["Exhaustive"]


class Exhaustive:
    """Every single extra event."""

    complete = True

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """Steps outside, kinds inside, so that runs that begin alike come together."""
        del name
        return itertools.islice(self._all(extras_of(base), steps), first, None)

    def _all(self, extras: tuple[Action, ...], steps: int) -> Iterator[tuple[Placed, ...]]:
        for step in range(1, steps + 1):
            for action in extras:
                yield (Placed(step, action),)
