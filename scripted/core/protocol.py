"""The adapter protocol: what a scheduler offers so that schedules of it can be run, searched and replayed.

An *adapter* makes the parts of a run: a *machine*, which is the scheduler with its memory; a *device*, which computes
launches; and an *oracle*, which judges every step (``scripted.core.oracle``). Further abilities are protocols of their
own, each beside the code that asks for it with ``isinstance``: ``HasMutants``, ``CopiesRuns``, ``RunsScripts``,
``GeneratesTargets`` and others. ``scripted.sdk`` brings everything but the machine for schedulers of the usual shape.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeAlias, runtime_checkable

import msgspec

from scripted.core.action import Action, RunLike
from scripted.core.machine import (
    ConfigT,
    DeviceT,
    EventT,
    LimitsOut,
    MachineT,
    OutputT,
    RecordIn,
    RecordT,
    StepT,
)  # fmt: skip
from scripted.core.oracle import OracleT


class WrittenTest(msgspec.Struct, frozen=True):
    """``text`` is the file, None when no form of it tells the bug from its absence. ``said`` is for the console."""

    text: str | None
    said: tuple[str, ...]


class TestHead(msgspec.Struct, frozen=True):
    """The lines above the body of a written test: imports around ``from scripted import scripted``, the decorator."""

    decorator: str
    imports: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


# The value of a setting, as words and reports have it.
ConfigValue: TypeAlias = str | int | float | bool | None
# The version of what an adapter implements and imports. An adapter may state it as its ``api``; another one is refused.
ADAPTER_API: Final = 1


class RunRules(Protocol[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]):
    """The questions that a run asks its adapter. None of them changes the scheduler."""

    resuming: Action | None
    """The action that ends a pause, if there are pauses."""

    def new_step(self, events: tuple[EventT, ...], now: float) -> StepT:
        """The input of one step, which the loop hands to the machine."""
        ...

    def also_due(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]
    ) -> Sequence[EventT]:
        """Events beside results that the next step gets by themselves, after the results."""
        ...

    def obstacle(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]
    ) -> Action | None:
        """What undoes the next thing that keeps an open request from its end; None when nothing does.

        While there is none, an open request goes on, or the scheduler has broken its promise. The run itself releases
        held results and ends pauses.
        """
        ...

    def finale(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT], turn: int
    ) -> Sequence[EventT]:
        """The last events of every run, given when all requests have ended, turn by turn from 0 until there are none.

        ``oracle.at_end`` looks at what is left.
        """
        ...

    def where(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT], rid: str | None
    ) -> tuple[str, str]:
        """For the coverage table: the state of this request, or with None of all; the state of the pipeline."""
        ...

    def what_is_busy(self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]) -> str:
        """Counts that say why a run does not end, for reports: ``waiting=1 running=0 in_flight=2``."""
        ...

    def record_step(self, step: StepT, stepped: OutputT | None, machine: MachineT, error: str | None) -> RecordT:
        """The record of one step; with ``error``, without ``stepped``, of the step that the machine died in."""
        ...


class Adapter(
    RunRules[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT],
    Protocol[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT, LimitsOut],
):
    """A scheduler that can be searched: its language, its configurations, and the parts of a run."""

    name: str
    actions: tuple[type[Action], ...]

    undoing: tuple[Action, ...]
    """Actions that random schedules need beside what can be added to a workload: they undo others."""

    packages: tuple[str, ...]
    """Packages of the scheduler: an exception that their code raises is a finding, whoever called it."""

    @property
    def workloads(self) -> Mapping[str, str]:
        """The base schedules by name, as text without the adapter's name."""
        ...

    def read_config(self, words: Mapping[str, str]) -> ConfigT:
        """The configuration of ``name=value`` words. Raises ValueError, as this adapter's own users see it."""
        ...

    def config_words(self, config: ConfigT) -> Mapping[str, ConfigValue]:
        """The inverse: every value that is not at its default."""
        ...

    def limits_of(self, config: ConfigT) -> LimitsOut:
        """Whatever the adapter's actions need to know of a configuration to make up additions."""
        ...

    def new_parts(self, config: ConfigT, *, record: bool) -> tuple[MachineT, DeviceT, OracleT]:
        """A machine, a device and an oracle, as good as new. ``record``: every step will be recorded."""
        ...

    def drive(self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]) -> None:
        """Run the loop: ask ``run.next_step(previous)``, step the machine, launch, until None is the answer."""
        ...


# -- what only some adapters offer to runs; each is asked once a run --


@runtime_checkable
class StatesApi(Protocol):
    """An adapter that states the version of the adapter API that it is written for."""

    api: int


@runtime_checkable
class Audits(Protocol):
    """A scheduler with audits of its own: these exceptions are findings too."""

    violations: tuple[type[Exception], ...]


@runtime_checkable
class ShrinksConfigs(Protocol[ConfigT]):
    """Configurations can be made smaller, one setting at a time."""

    def smaller_configs(self, config: ConfigT) -> Iterator[ConfigT]: ...


@runtime_checkable
class SkipsChecks(Protocol):
    """Some checks are so slow that not every run of a search makes them."""

    def leave_out(self, run: RunLike) -> None:
        """Do not make them in this run, from its beginning on."""
        ...


@runtime_checkable
class ChecksRecords(Protocol[RecordIn]):
    """A recorded run can show what no single step does."""

    def check_records(self, records: Sequence[RecordIn]) -> None:
        """Raises Violation."""
        ...


class Freezer(Protocol):
    """A run as it was before one of its steps."""

    def thaw(self, name: str) -> RunLike:
        """A run of this name that goes on from there; it shares nothing that can change."""
        ...


@runtime_checkable
class CopiesRuns(Protocol):
    """Runs can be copied and compared, so that schedules which begin alike share their beginning."""

    def freeze(self, run: RunLike) -> Freezer | None:
        """The run as it is now, to be continued any number of times; None when it cannot be copied."""
        ...

    def digests(self, run: RunLike) -> Iterator[bytes | None]:
        """The whole state of a run between two steps, in parts; None for a part that this run lacks.

        Runs whose parts are equal go on alike. Raises UnreadableState where a state cannot be read.
        """
        ...


def violations_of(adapter: Adapter) -> tuple[type[Exception], ...]:
    """The exceptions of the scheduler's own audits."""
    return adapter.violations if isinstance(adapter, Audits) else ()
