"""Pairs: two extra events within a few steps of each other, everywhere in a workload. Complete within its window."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule
from scripted.search.extras import extras_of

__all__ = ["Pairs"]

DEFAULT_WINDOW_STEPS = 2


class Pairs:
    """Two extra events, the second at most ``window_steps`` after the first; ``marked`` keeps to these first steps."""

    complete = True

    def __init__(self, *, window_steps: int = DEFAULT_WINDOW_STEPS, marked: frozenset[int] | None = None) -> None:
        self._window_steps = window_steps
        self._marked = marked

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """First events outside, so that runs that begin alike come together."""
        del name
        return itertools.islice(self._all(extras_of(base), steps), first, None)

    def _all(self, extras: tuple[Action, ...], steps: int) -> Iterator[tuple[Placed, ...]]:
        for step in range(1, steps + 1):
            if self._marked is not None and step not in self._marked:
                continue
            for one in extras:
                for later in range(self._window_steps + 1):
                    for other in extras:
                        yield Placed(step, one), Placed(step + later, other)
