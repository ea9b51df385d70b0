"""The adapter protocol: the interface through which schedules of a scheduler are run, searched and replayed.

An *adapter* makes the parts of a run: a *machine*, which is the scheduler with its memory; a *device*, which computes
launches; and an *oracle*, which judges every step (``scripted.core.oracle``). Optional abilities are protocols of
their own, each beside the code that tests for it with ``isinstance``: ``HasMutants``, ``CopiesRuns``, ``RunsScripts``,
``GeneratesTargets`` and others. ``scripted.sdk`` has everything but the machine for schedulers of the usual shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    """The ``text`` of a test file; None if no test could tell the bug from its absence. ``said`` is for the console."""

    text: str | None
    said: tuple[str, ...]


class TestHead(msgspec.Struct, frozen=True):
    """The lines above the body of a written test: its imports and its decorator.

    ``imports`` stand before ``from scripted import scripted``, ``more`` after it, ``before`` above the decorator.
    """

    decorator: str
    imports: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


# The value of a setting in schedules and reports.
ConfigValue: TypeAlias = str | int | float | bool | None
# The version of the interface of adapters. An adapter may state the one it was written for as ``api``; any other is
# refused.
ADAPTER_API: Final = 1


class RunRules(Protocol[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]):
    """The members that a run uses while it steps. None of them changes the scheduler."""

    resuming: Action | None
    """The action that ends a pause; None for a scheduler without pauses."""

    def new_step(self, events: tuple[EventT, ...], now: float) -> StepT:
        """Make the input of one step, which the loop hands to the machine."""
        ...

    def also_due(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]
    ) -> Sequence[EventT]:
        """Return the events besides results that are due in the next step, in order; they follow its results."""
        ...

    def obstacle(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]
    ) -> Action | None:
        """Return the action that removes the next obstacle to an open request; None when nothing blocks one.

        Without an obstacle, an open request must make progress. The run itself releases held results and ends pauses.
        """
        ...

    def finale(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT], turn: int
    ) -> Sequence[EventT]:
        """Return the events of clean-up step ``turn``, from 0 on, after every request has ended; empty to stop.

        ``oracle.at_end`` then judges the remaining state.
        """
        ...

    def where(
        self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT], rid: str | None
    ) -> tuple[str, str]:
        """Return the coverage cell: the state of this request, or of all for None, and the state of the pipeline."""
        ...

    def what_is_busy(self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]) -> str:
        """Return the counts that explain why a run does not end: ``waiting=1 running=0 in_flight=2``."""
        ...

    def record_step(self, step: StepT, stepped: OutputT | None, machine: MachineT, error: str | None) -> RecordT:
        """Make the record of one step; if the machine died in it, ``stepped`` is None and ``error`` is set."""
        ...


class Adapter(
    RunRules[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT],
    Protocol[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT, LimitsOut],
):
    """A scheduler that can be searched: its language, its configurations, and the parts of a run."""

    name: str
    actions: tuple[type[Action], ...]

    undoing: tuple[Action, ...]
    """Actions that undo others: random schedules draw them besides the additions to a workload."""

    packages: tuple[str, ...]
    """Packages of the scheduler: an exception raised in their code is a finding, even when the harness called it."""

    @property
    def workloads(self) -> Mapping[str, str]:
        """The workloads by name, as schedule text without the adapter's name."""
        ...

    def read_config(self, words: Mapping[str, str]) -> ConfigT:
        """Parse a configuration from ``name=value`` words. Raises ValueError with a text for the adapter's users."""
        ...

    def config_words(self, config: ConfigT) -> Mapping[str, ConfigValue]:
        """Return every value that is not at its default: the inverse of ``read_config``."""
        ...

    def limits_of(self, config: ConfigT) -> LimitsOut:
        """Return the limits from which the adapter's actions generate additions."""
        ...

    def new_parts(self, config: ConfigT, *, record: bool) -> tuple[MachineT, DeviceT, OracleT]:
        """Make a machine, a device and an oracle in their initial state. ``record``: every step will be recorded."""
        ...

    def drive(self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT]) -> None:
        """Run the loop: take a step from ``run.next_step(previous)``, step the machine, launch; stop at None."""
        ...


# -- optional abilities, tested once per run --


@runtime_checkable
class StatesApi(Protocol):
    """An adapter that states the version of the adapter API it was written for."""

    api: int


@runtime_checkable
class Audits(Protocol):
    """A scheduler that audits itself: the audits' exceptions are findings too."""

    violations: tuple[type[Exception], ...]


@runtime_checkable
class ShrinksConfigs(Protocol[ConfigT]):
    """An adapter that shrinks configurations, one setting at a time."""

    def smaller_configs(self, config: ConfigT) -> Iterator[ConfigT]: ...


@runtime_checkable
class SkipsChecks(Protocol):
    """An adapter with checks that are too slow for every run of a search."""

    def leave_out(self, run: RunLike) -> None:
        """Disable the slow checks in this run, which has not begun."""
        ...


@runtime_checkable
class ChecksRecords(Protocol[RecordIn]):
    """An adapter with checks over all steps of a recorded run."""

    def check_records(self, records: Sequence[RecordIn]) -> None:
        """Judge the records of a whole run. Raises Violation."""
        ...


@runtime_checkable
class ChecksAlike(Protocol):
    """An adapter that may make the same checks in every run, whether it is recorded or one of a search."""

    @property
    def checks_alike(self) -> bool: ...


@runtime_checkable
class DeclaresWindows(Protocol):
    """An adapter that declares windows: named situations that a search should reach.

    A search counts the runs in which each window was open after a step, and reports windows that never opened: bugs in
    them stay hidden.
    """

    windows: Mapping[str, Callable[[RunLike], bool]]


class Freezer(Protocol):
    """A checkpoint of a run, taken between two steps."""

    def thaw(self, name: str) -> RunLike:
        """Make a run of this name that continues from the checkpoint and shares no mutable state with others."""
        ...


@runtime_checkable
class CopiesRuns(Protocol):
    """An adapter whose runs can be copied and compared, so that schedules with a common prefix run it once."""

    def freeze(self, run: RunLike) -> Freezer | None:
        """Take a checkpoint that can be continued any number of times; None when the run cannot be copied."""
        ...

    def digests(self, run: RunLike) -> Iterator[bytes | None]:
        """Yield digests of the parts of a run's state between two steps; None for a part that this run lacks.

        Runs with equal digests continue alike. Raises UnreadableState for a state that cannot be read.
        """
        ...


def windows_of(adapter: Adapter) -> tuple[str, ...]:
    """Return the names of the windows that an adapter declares."""
    return tuple(adapter.windows) if isinstance(adapter, DeclaresWindows) else ()


def violations_of(adapter: Adapter) -> tuple[type[Exception], ...]:
    """Return the exceptions of the scheduler's own audits."""
    return adapter.violations if isinstance(adapter, Audits) else ()
