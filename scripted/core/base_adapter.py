"""The base class of adapters: everything that does not depend on a scheduler's messages.

``SchedulerAdapter`` derives from it for machines of the SDK, ``FleetAdapter`` for fleets of machines, and the adapter
of Lockstep's engine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import ClassVar, Generic

from scripted.core.action import Action, RunLike
from scripted.core.machine import ConfigT, DeviceT, EventT, MachineT, OutputT, RecordT, StepT, close_machine
from scripted.core.mutant import Mutant
from scripted.core.oracle import OracleT
from scripted.core.refusals import HarnessError, ScriptDefinitionError
from scripted.core.states import StateReader


class BaseAdapter(ABC, Generic[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]):
    """Implements the loop, state digests and a table of mutants.

    ``states`` leaves out attributes that no later step depends on. ``mutants`` are the mutants that a search looks for.
    """

    name: str
    mutants: Mapping[str, Mutant]
    states: ClassVar[StateReader]

    # -- a run --

    @abstractmethod
    def take_step(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT], step: StepT
    ) -> OutputT:
        """Do one iteration of ``drive``: step the machine, launch, send."""

    def drive(self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]) -> None:
        output: OutputT | None = None
        try:
            with run:
                while (step := run.next_step(output)) is not None:
                    output = self.take_step(run, step)
        except BaseException:
            # The reason why the run ended says more than a thread that fails to end afterwards.
            with suppress(HarnessError):
                close_machine(run.machine)
            raise
        close_machine(run.machine)

    def what_is_busy(self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]) -> str:
        return " ".join(f"{name}={count}" for name, count in run.machine.counts().items())

    def also_due(
        self,
        run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT],  # noqa: ARG002
    ) -> Sequence[EventT]:
        """Return no events besides results; override it for a device that has other answers."""
        return ()

    def obstacle(
        self,
        run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT],  # noqa: ARG002
    ) -> Action | None:
        """Return no obstacle; override it if requests can stall for a known reason."""
        return None

    def digests(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]
    ) -> Iterator[bytes | None]:
        """Yield one digest of the whole state. Raises UnreadableState for an object that cannot be read."""
        yield self.states.digest(run.machine, run.device, run.oracle, *run.own_state)

    # -- mutants --

    @property
    def mutant_names(self) -> tuple[str, ...]:
        return tuple(self.mutants)

    def mutant_named(self, name: str) -> Mutant:
        """Return the mutant with this name. Raises ScriptDefinitionError if there is none."""
        if name not in self.mutants:
            known = ", ".join(self.mutants) or "none"
            raise ScriptDefinitionError(f"{self.name} has no mutant {name!r}; there are: {known}")
        return self.mutants[name]

    def switched_on(self, mutant: str | None) -> AbstractContextManager[None]:
        """Switch a mutant on; None leaves the scheduler as it is. Raises ScriptDefinitionError."""
        return nullcontext() if mutant is None else self.mutant_named(mutant).switched_on()

    def bugs_met(self, codes: Container[int]) -> Sequence[str]:
        """Return the mutants that edit one of the code objects with these ids."""
        return [name for name, mutant in self.mutants.items() if mutant.is_met(codes)]


def config_text(words: Mapping[str, object]) -> str:
    """Describe a configuration in a report by the values that differ from the defaults."""
    return ", ".join(f"{name}={value}" for name, value in words.items()) or "the default configuration"


def written_call(name: str, arguments: Sequence[str], width: int) -> str:
    """Format a call: on one line if it fits in ``width`` characters, otherwise with one argument per line."""
    text = f"{name}({', '.join(arguments)})"
    if len(text) <= width:
        return text
    return "\n".join([f"{name}(", *(f"    {argument}," for argument in arguments), ")"])
