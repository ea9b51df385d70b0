"""A run of a schedule, as actions see it: the gate, between two steps of the machine."""

from __future__ import annotations

from typing import Any, Protocol

from scripted.core.clock import VirtualClock

__all__ = ["Run"]


class Run(Protocol):
    """One run of a schedule, as actions see it: they act on it before a step."""

    step: int
    implied: list[Any]
    machine: Any
    pipeline: Any
    judge: Any
    clock: VirtualClock

    @property
    def config(self) -> Any:
        """The configuration of the machine."""
        ...

    @property
    def stalled(self) -> set[int]:
        """Stages that are stopped: while there is one, no result comes."""
        ...

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        ...

    @property
    def is_holding(self) -> bool:
        """Results are held."""
        ...

    def is_live(self, rid: str) -> bool:
        """A request of this rid has begun and not ended."""
        ...

    def new_call_id(self) -> str:
        """The id of the next administrative call."""
        ...

    def give(self, event: Any) -> None:
        """The next step sees this event."""
        ...

    def happened(self, event: Any) -> None:
        """This took effect already, between two steps: it stands before the events of the next step."""
        ...

    def hold_results(self) -> None:
        """Keep results back from the next step on."""
        ...

    def release_results(self, count: int | None) -> None:
        """Let the oldest ``count`` through, or all and stop holding."""
        ...

    def lose_results(self) -> None:
        """Nothing in flight will come back."""
        ...
