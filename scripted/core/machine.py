"""The parts of a run that a scheduler brings: the machine, the outputs of its steps, the device, and their types.

The type parameters of runs and adapters stand here as well. Each has a default, so that code for every adapter
writes ``Run`` and an adapter's own code ``Run[MyConfig, MyEvent, ...]``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from typing_extensions import TypeVar


class Microbatch(Protocol):
    """A launch: any object with an id that no other launch of the run has."""

    @property
    def id(self) -> int: ...


class StepOutput(Protocol):
    """The output of one step of the machine.

    ``microbatch`` is the launch, or None. ``replies`` are what clients are told, in order. ``again`` says that a step
    without any event may do more. ``deadline`` is the time, in seconds of the clock that steps are given, at which a
    step is due although nothing happens; None for none.
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

    An exception that ``step`` raises is a finding. Nothing in it may depend on time, randomness or the order of a hash:
    the same events give the same steps.
    """

    @property
    def depth(self) -> int:
        """Steps from a launch to its result: a launch of step ``n`` has its result in the events of ``n + depth``."""
        ...

    def step(self, events: Sequence[_EventIn], now: float) -> _OutputOut:
        """Take these events, in order, and do one step of the scheduler at this time, in seconds."""
        ...

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Sizes that say how busy it is and what it owns: requests by state, batches in flight, ``blocks_free``."""
        ...


class Device(Protocol[_EventOut]):
    """Computes launches. The adapter's loop gives it microbatches; a run takes their results when they are due."""

    def next_completion(self, timeout_s: float | None) -> _EventOut | None:
        """The event with the result of the oldest microbatch that is not taken; None when there is none."""
        ...
