"""What a strategy is: from one base workload to the additions that are worth a run."""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Protocol

from scripted.core.placed import Placed
from scripted.core.schedule import Schedule

__all__ = ["Strategy", "StrategyName"]


class StrategyName(StrEnum):
    """How a campaign searches."""

    EXHAUSTIVE = "exhaustive"
    RANDOM = "random"
    SWARM = "swarm"
    PCT = "pct"
    SURW = "surw"
    FEEDBACK = "feedback"


class Strategy(Protocol):
    """``complete`` strategies end by themselves and have then tried everything of their kind; others never end."""

    complete: bool

    def additions(self, name: str, base: Schedule, steps: int, *, first: int = 0) -> Iterator[tuple[Placed, ...]]:
        """What to add to the workload ``base``, which takes ``steps`` steps by itself, from the ``first``-th on.

        Equal calls yield the same.
        """
        ...
