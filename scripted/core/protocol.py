"""The adapter protocol: what a scheduler must offer so that it can be searched, replayed, shrunk and written down.

An *adapter* makes the parts of one run: a *machine*, which is the scheduler with its memory; a *device*, which
computes what the machine launches; and an *oracle*, which says what was promised (``scripted.core.oracle``). A run
drives them from a schedule. Lockstep's own scheduler is an adapter like any other (``scripted_lockstep``). For
a scheduler of the usual shape everything but the machine is ready made: see ``scripted.sdk``.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec

from scripted.core.action import Action, RunLike
from scripted.core.placed_action import Placed


class WrittenTest(msgspec.Struct, frozen=True):
    """``text`` is the file, None when no form of it tells the bug from its absence. ``said`` is for the console."""

    text: str | None
    said: tuple[str, ...]


class TestHead(msgspec.Struct, frozen=True):
    """What stands above a test of an adapter: lines around ``from scripted import scripted``, and the decorator."""

    decorator: str
    imports: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


# The version of what an adapter implements and imports. An adapter may state it as its ``api``; another one is refused.
ADAPTER_API: Final = 1


class Microbatch(Protocol):
    """What one step launched: any object with an id that no other launch of the run has."""

    @property
    def id(self) -> int: ...


class StepOutput(Protocol):
    """The output of one step of the machine.

    ``microbatch`` is what it launched, or None. ``replies`` are what clients are told, in order. ``again`` says that a
    step without any event may do more. ``deadline`` is the time, in seconds of the clock that steps are given, at which
    a step is due although nothing happens; None for none.
    """

    @property
    def microbatch(self) -> Microbatch | None: ...

    @property
    def replies(self) -> Sequence[Any]: ...

    @property
    def again(self) -> bool: ...

    @property
    def deadline(self) -> float | None: ...


class Machine(Protocol):
    """The scheduler and its memory, frozen between two steps.

    An exception that ``step`` raises is a finding. Nothing in it may depend on time, randomness or the order of a hash:
    the same events give the same steps.
    """

    depth: int
    """Steps from a launch to its result: the result of what step ``n`` launches is an event of step ``n + depth``."""

    def step(self, events: Sequence[Any], now: float) -> StepOutput:
        """Take these events, in order, and do one step of the scheduler at this time, in seconds."""
        ...

    @property
    def is_idle(self) -> bool:
        """Nothing waits, runs or is in flight."""
        ...

    def counts(self) -> Mapping[str, int]:
        """Sizes that say how busy it is and what it owns: requests by state, batches in flight, ``blocks_free``."""
        ...


class Freezer(Protocol):
    """A run as it was before one of its steps."""

    def thaw(self, name: str) -> RunLike:
        """A run of this name that goes on from there; it shares nothing that can change."""
        ...


class Adapter(Protocol):
    """A scheduler that can be searched. ``violations`` are the exceptions of its own audits, which are findings too.

    So is what code of its ``packages`` raises, whoever called it.

    ``undoing`` are the actions that random schedules need beside what can be added to a workload: they undo others.
    ``resuming`` is the one that ends a pause, if there is any.
    ``workloads`` are the base schedules, as text without the adapter's name.
    """

    name: str
    actions: tuple[type[Action], ...]
    resuming: Action | None
    undoing: tuple[Action, ...]
    violations: tuple[type[Exception], ...]
    packages: tuple[str, ...]

    @property
    def workloads(self) -> Mapping[str, str]: ...

    # -- configurations --

    def read_config(self, words: Mapping[str, str]) -> Any:
        """The configuration that these ``name=value`` words say. Raises ValueError, as this adapter's own users see."""
        ...

    def config_words(self, config: Any) -> Mapping[str, Any]:
        """The inverse: every value that is not at its default."""
        ...

    def smaller_configs(self, config: Any) -> Iterator[Any]: ...

    def limits_of(self, config: Any) -> Any:
        """What the actions of this adapter need to know of a configuration to make up additions."""
        ...

    # -- a run --

    def new_parts(self, config: Any, *, record: bool) -> tuple[Any, Any, Any]:
        """A machine, a device and an oracle, as good as new. ``record``: every step will be kept."""
        ...

    def new_step(self, events: tuple[Any, ...], now: float) -> Any:
        """What the loop hands to the machine: an object with ``events`` and ``now``."""
        ...

    def drive(self, run: Any) -> None:
        """Run the loop: ask ``run.next_step(previous)``, step the machine, launch, until None is the answer."""
        ...

    def leave_out(self, run: Any) -> None:
        """From its beginning on, do not check this run for what some runs of a search are not checked for."""
        ...

    def what_is_busy(self, run: Any) -> str:
        """Counts that say why a run does not end, for reports: ``waiting=1 running=0 in_flight=2``."""
        ...

    def where(self, run: Any, rid: str | None) -> tuple[str, str]:
        """For the coverage table: the state of this request, or with None of all; the state of the pipeline."""
        ...

    def obstacle(self, run: Any) -> Action | None:
        """What undoes the next thing that keeps an open request from its end; None when nothing does.

        While there is none, an open request goes on, or the scheduler has broken its promise. Held results are released
        and pauses ended without it.
        """
        ...

    def also_due(self, run: Any) -> Sequence[Any]:
        """Events beside results that the next step gets by themselves, after those."""
        ...

    def finale(self, run: Any, turn: int) -> Sequence[Any]:
        """The last events of every run, given when all requests have ended, turn by turn from 0 until there are none.

        ``oracle.at_end`` looks at what is left.
        """
        ...

    def record_step(self, step: Any, stepped: Any | None, machine: Any, error: str | None) -> Any:
        """One step written down; with ``error``, without ``stepped``, the one that the machine died in."""
        ...

    def as_log(self, records: Sequence[Any], config: Any) -> Any:
        """The steps as they are shown, in words: a ``scripted.report.step_log.StepLog``."""
        ...

    def check_records(self, records: Sequence[Any]) -> None:
        """What can only be judged from a whole run that was written down. Raises Violation."""
        ...

    def freeze(self, run: Any) -> Freezer | None:
        """The run as it is now, to be gone on from any number of times; None when it cannot be copied."""
        ...

    def digests(self, run: Any) -> Iterable[bytes | None]:
        """The whole state of a run between two steps, in parts; None for a part that this run lacks.

        Runs whose parts are equal go on alike. Raises UnreadableState where a state cannot be read.
        """
        ...

    # -- recordings --

    def replay_recording(self, path: Path, *, until: int | None, last_steps: int | None) -> Any:
        """Do the recorded steps again and compare them: a ``scripted.report.rerun.Rerun``.

        All steps are done up to ``until``; ``last_steps`` of them are kept, or all. Raises what a bad file raises.
        """
        ...

    def schedule_of_recording(self, path: Path, *, until: int | None) -> Any:
        """The recorded steps as a schedule, as far as one can say them: a ``scripted.core.translation.Translated``."""
        ...

    def plan_of(self, record: Any) -> object:
        """What a step launched, in a form in which two runs can be compared; None for nothing."""
        ...

    # -- mutants --

    def switched_on(self, mutant: str | None) -> AbstractContextManager[None]:
        """A bug that is put in for as long as this is open; None is no bug. Raises ValueError for an unknown one."""
        ...

    @property
    def mutant_names(self) -> tuple[str, ...]: ...

    def bugs_met(self, codes: Container[int]) -> Sequence[str]:
        """The mutants that break code which a run called, given by the ids of its code objects."""
        ...

    def write_mutants(self, page: Path, found: Sequence[Any]) -> None:
        """Write into a Markdown page how soon the search found each mutant."""
        ...

    # -- tests --

    def script_target(self, target: str) -> Any:
        """The registered script ``FILE::NAME`` as a target. Raises ScriptDefinitionError where there is none."""
        ...

    def run_script(
        self, script: Any, arguments: Mapping[str, Any], *, config: Any, options: Any, mutant: str | None
    ) -> ScriptEnded:
        """Run a generator function of ``t`` on a machine of this configuration. Raises ScriptError."""
        ...

    def settling(self, placed: Sequence[Placed], outcome: Any) -> Sequence[Placed]:
        """What ended the run of a schedule, and what a run that broke off has left for a script to end."""
        ...

    def standalone_test(self, schedules: Sequence[Any], *, name: str) -> WrittenTest:
        """A test of the scheduler's own classes, without this project, of the first of these that makes one."""
        ...

    def test_head(self, config: Any, body: str) -> TestHead:
        """What stands above the ``body`` of a test that is written."""
        ...


class ScriptEnded(Protocol):
    """How a script that passed ended; ``log`` has its steps, where the options asked for a record."""

    @property
    def steps(self) -> int: ...

    @property
    def log(self) -> Any: ...

    @property
    def notes(self) -> tuple[Any, ...]: ...

    def counts(self) -> dict[str, int]:
        """What the summary of many scripts adds up, by name."""
        ...
