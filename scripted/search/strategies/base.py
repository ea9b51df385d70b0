"""What a strategy is: from one base workload to the additions that are worth a run."""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from typing import Final, Protocol

from scripted.core.action import Action
from scripted.core.placed import Placed
from scripted.core.schedule import Schedule

# Nothing happens after what ends a whole run: one run in so many may have something like that.
_FATAL_EVERY_RUNS: Final = 8


class StrategyName(StrEnum):
    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    SWARM = "swarm"
    PCT = "pct"
    SURW = "surw"
    FEEDBACK = "feedback"


class Strategy(Protocol):
    """``complete`` strategies end by themselves and have then tried everything of their kind; others never end."""

    complete: bool

    def additions(
        self, name: str, base: Schedule, steps: int, *, first: int = 0, acting: Sequence[Collection[Action]] = ()
    ) -> Iterator[tuple[Placed, ...]]:
        """What to add to the workload ``base``, which takes ``steps`` steps by itself, from the ``first``-th on.

        ``acting`` are the events that would have something to act on, before each of its steps, where that is known.
        Equal calls yield the same.
        """
        ...


def mostly_survivable(rng: random.Random, extras: Sequence[Action]) -> Sequence[Action]:
    """What a run is drawn from: these, in most runs without what is fatal."""
    if not rng.randrange(_FATAL_EVERY_RUNS):
        return extras
    return [action for action in extras if not action.is_fatal] or extras
