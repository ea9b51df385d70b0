"""Protocols for the parts that a scheduler brings to a run: the machine, the output of its steps, and the device.

Also the type parameters of runs and adapters. Each has a default: code for all adapters writes ``Run``, and an
adapter's own code ``Run[MyConfig, MyEvent, ...]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from typing_extensions import TypeVar


class Microbatch(Protocol):
    """A launch: any object with an id that is unique in the run."""

    @property
    def id(self) -> int: ...


class StepOutput(Protocol):
    """The output of one step of the machine.

    ``microbatch`` is the launch, or None. ``replies`` go to clients, in order. ``again``: another step may make
    progress without an event. ``deadline``: the time, on the steps' clock in seconds, at which a step is due even
    without an event; None if there is none.
    """

    @property
    def microbatch(self) -> Microbatch | None: ...

    @property
    def replies(self) -> Sequence[object]: ...

    @property
    def again(self) -> bool: ...

    @property
    def deadline(self) -> float | None: ...


ConfigT = TypeVar("ConfigT", default=Any)
LimitsT = TypeVar("LimitsT", default=Any)
EventT = TypeVar("EventT", default=Any)
StepT = TypeVar("StepT", default=Any)
OutputT = TypeVar("OutputT", bound=StepOutput, default=Any)
RecordT = TypeVar("RecordT", default=Any)
MachineT = TypeVar("MachineT", bound="Machine", default=Any)
DeviceT = TypeVar("DeviceT", bound="Device", default=Any)

ConfigIn = TypeVar("ConfigIn", contravariant=True, default=Any)
RecordIn = TypeVar("RecordIn", contravariant=True, default=Any)
LimitsOut = TypeVar("LimitsOut", covariant=True, default=Any)
_EventIn = TypeVar("_EventIn", contravariant=True, default=Any)
_EventOut = TypeVar("_EventOut", covariant=True, default=Any)
_OutputOut = TypeVar("_OutputOut", covariant=True, bound=StepOutput, default=Any)


class Machine(Protocol[_EventIn, _OutputOut]):
    """The scheduler and its memory, frozen between two steps.

    An exception raised by ``step`` is a finding. The machine must be deterministic: it may not depend on wall-clock
    time, randomness or hash order, so that equal events give equal steps.
    """

    @property
    def depth(self) -> int:
        """Steps from a launch to its result: the result of a launch in step ``n`` is an event of step ``n + depth``."""
        ...

    def step(self, events: Sequence[_EventIn], now: float) -> _OutputOut:
        """Apply these events, in order, and do one step of the scheduler at this time, in seconds."""
        ...

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits, runs or is in flight."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Return counts for reports: requests by state, batches in flight, ``blocks_free``."""
        ...


@runtime_checkable
class Closable(Protocol):
    """A machine with threads, event loops or files of its own.

    It is never copied. ``counts`` still works once it is closed.
    """

    def close(self) -> None:
        """End and release everything; called once, when the run is over."""
        ...


class HasToBeClosed:
    """Marks a part of a machine that only the machine's own ``close`` can end."""


def close_machine(machine: object) -> None:
    """Close a machine if it is ``Closable``."""
    if isinstance(machine, Closable):
        machine.close()


class Device(Protocol[_EventOut]):
    """Computes launches. The adapter's loop gives it microbatches; a run takes their results when they are due."""

    def next_completion(self, timeout_s: float | None) -> _EventOut | None:
        """Return the result of the oldest microbatch whose result has not been taken; None if there is none."""
        ...
