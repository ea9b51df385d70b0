"""What a strategy is: from one base workload to the additions that are worth a run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.run import Cell
from scripted.core.schedule import Schedule

# Nothing happens after what ends a whole run: one run in so many may have something like that.
_FATAL_EVERY_RUNS: Final = 8


class StrategyName(StrEnum):
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    SWARM = "swarm"
    PCT = "pct"
    SURW = "surw"


# What an action would meet in a run as it is now; None where it has nothing to act on.
Meets = Callable[[Action], Cell | None]


class Drawn:
    """Additions of which the steps are known before a run, and each action when its step has come.

    So it is one that has something to act on then, whatever the ones before it did. ``placed`` are those so far;
    ``name`` tells a run from others.
    """

    def __init__(self, name: str, steps: Sequence[int], choose: Callable[[Meets], Action]) -> None:
        self.name = name
        self.steps = steps
        self.placed: tuple[Placed, ...] = ()
        self._choose = choose

    def come(self, step: int, meets: Meets) -> Sequence[Placed]:
        """Choose those of this step, which is not before any that was asked for; they are in ``placed`` from now on."""
        here = [Placed(step, self._choose(meets)) for one in self.steps[len(self.placed) :] if one == step]
        self.placed += tuple(here)
        return here


class Strategy(Protocol):
    """``complete`` strategies end by themselves and have then tried everything of their kind; others never end."""

    complete: bool

    def additions(
        self, name: str, base: Schedule, steps: int, *, first: int = 0
    ) -> Iterator[tuple[Placed, ...]] | Iterator[Drawn]:
        """What to add to the workload ``base``, which takes ``steps`` steps by itself, from the ``first``-th on.

        Equal calls yield the same.
        """
        ...


def mostly_survivable(rng: random.Random, extras: Sequence[Action]) -> Sequence[Action]:
    """What a run is drawn from: these, in most runs without what is fatal."""
    if not rng.randrange(_FATAL_EVERY_RUNS):
        return extras
    return [action for action in extras if not action.is_fatal] or extras
