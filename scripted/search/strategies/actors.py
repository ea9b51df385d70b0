"""Actors: everybody who does something to a scheduler, and the pipeline, which returns results one by one.

One of them acts in each step. Which one is what ``pct`` and ``surw`` decide.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from scripted.core.action import Action
from scripted.core.common_actions import HoldResults, ReleaseResults
from scripted.core.placed import Placed
from scripted.search.strategies.base import mostly_survivable

PIPELINE = -1
_MOST_ACTORS = 4
_MOST_ACTIONS = 3


def draw_actors(rng: random.Random, extras: Sequence[Action]) -> list[list[Action]]:
    extras = mostly_survivable(rng, extras)
    return [
        [rng.choice(extras) for _ in range(rng.randint(1, _MOST_ACTIONS))] for _ in range(rng.randint(1, _MOST_ACTORS))
    ]


def acting_in_turn(actors: Sequence[Sequence[Action]], turns: Iterable[int]) -> tuple[Placed, ...]:
    """From step 1 on the actor whose turn it is does its next action, or the pipeline returns one result."""
    left = [iter(actions) for actions in actors]
    placed = [Placed(1, HoldResults())]
    for step, actor in enumerate(turns, 1):
        placed.append(Placed(step, ReleaseResults(count=1) if actor == PIPELINE else next(left[actor])))
    return tuple(placed)
