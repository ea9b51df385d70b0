"""The sweep: one extra event at every step, of every kind, at every target. Complete, so that its success is a claim."""

from __future__ import annotations

from collections.abc import Iterator

from scripted.explore.actions import Placed
from scripted.explore.extras import extras_of
from scripted.explore.schedule import Schedule

__all__ = ["Sweep"]


class Sweep:
    """Every single extra event."""

    complete = True

    def additions(self, name: str, base: Schedule, steps: int) -> Iterator[tuple[Placed, ...]]:
        """Steps outside, kinds inside, so that runs that begin alike come together."""
        del name
        extras = extras_of(base)
        for step in range(1, steps + 1):
            for action in extras:
                yield (Placed(step, action),)
