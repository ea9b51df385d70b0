"""The base of adapters of fleets: several machines of another adapter, their links and one clock, as one machine.

A schedule does to each machine what a schedule of one does (``at on=d0 do="abort a"``), and to links and machines what
only a fleet has. Everything that is not of a fleet is asked of the other adapter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from scripted.core.action import Action
from scripted.core.adapters import adapter_named
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed_action import Placed
from scripted.core.protocol import WrittenTest
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.states import StateReader
from scripted.fleets.actions import TRAFFIC_ACTIONS, OnEngine, ReleaseTraffic, actions_on_engines, clause_of
from scripted.fleets.machine import (
    FleetConfig,
    FleetMachine,
    FleetOracle,
    FleetRecord,
    FleetStep,
    NoDevice,
    SearchedMember,
    merged,
)
from scripted.report.step_log import StepLog
from scripted.search.generated import Space

_STATES = StateReader()


class FleetAdapter(ABC):
    """Implements the adapter protocol. ``of`` is the adapter of one machine; it has a ``take_step`` too.

    ``inner_actions`` are those of one machine that a fleet has, ``more_actions`` those of this kind of fleet alone.
    """

    name: str
    of: str
    space: Space
    workloads: Mapping[str, str]
    inner_actions: tuple[type[Action], ...]
    resuming: ClassVar[None] = None
    undoing: ClassVar[tuple[Action, ...]] = ()

    def __init__(self, more_actions: Sequence[type[Action]] = ()) -> None:
        self.begin, self.at = actions_on_engines(self.name)
        self.actions: tuple[type[Action], ...] = (self.begin, self.at, *TRAFFIC_ACTIONS, *more_actions, AdvanceClock)

    def __getattr__(self, name: str) -> Any:
        """Whatever is not of a fleet."""
        return getattr(self.inner, name)

    @property
    def inner(self) -> Any:
        """The adapter of one machine."""
        return adapter_named(self.of)

    # -- what a kind of fleet says --

    @abstractmethod
    def role_of(self, name: str) -> str:
        """The role of a machine of this name. Raises BadCall."""

    @abstractmethod
    def config_of(self, config: FleetConfig, name: str) -> Any:
        """The configuration of one machine. Raises what its adapter raises."""

    @abstractmethod
    def new_member(self, machine: FleetMachine, config: FleetConfig, name: str, *, record: bool) -> SearchedMember:
        """A machine of this name that knows nothing."""

    # -- configurations --

    def read_config(self, words: Mapping[str, str]) -> FleetConfig:
        """``engines=p0,d0`` and the settings of one machine. Raises ConfigError, BadCall."""
        values = dict(words)
        names = tuple(values.pop("engines", "p0,d0").split(","))
        config = FleetConfig(self.inner.read_config(values), names)
        for name in names:
            self.role_of(name)
        return config

    def config_words(self, config: FleetConfig) -> Mapping[str, Any]:
        return {"engines": ",".join(config.names), **self.inner.config_words(config.engine)}

    def smaller_configs(self, config: FleetConfig) -> Iterator[FleetConfig]:
        for engine in self.inner.smaller_configs(config.engine):
            smaller = FleetConfig(engine, config.names)
            with suppress(ValueError):
                for name in config.names:
                    self.config_of(smaller, name)
                yield smaller

    def limits_of(self, config: FleetConfig) -> Any:
        return self.inner.limits_of(self.config_of(config, next(name for name in config.names if name[0] != "p")))

    # -- a run --

    def new_parts(self, config: FleetConfig, *, record: bool) -> tuple[FleetMachine, NoDevice, FleetOracle]:
        machine = FleetMachine(self.name, config, record=record)
        return machine, NoDevice(), FleetOracle(machine)

    def new_step(self, events: tuple[Any, ...], now: float) -> FleetStep:
        return FleetStep(events, now)

    def drive(self, run: Run) -> None:
        """One step of all machines at a time."""
        result = None
        with run:
            while (step := run.next_step(result)) is not None:
                result = run.machine.step(step.events, step.now)

    def leave_out(self, run: Run) -> None:
        for one in run.machine.fleet.members:
            self.inner.leave_out(one.run)

    def what_is_busy(self, run: Run) -> str:
        return "; ".join(f"{one.name}: {self.inner.what_is_busy(one.run)}" for one in run.machine.living)

    def where(self, run: Run, rid: str | None) -> tuple[str, str]:
        """The states of all machines."""
        places = [(one.name[0], self.inner.where(one.run, rid)[0]) for one in run.machine.living]
        return "; ".join(sorted({f"{role}: {place}" for role, place in places})), str(len(places))

    def obstacle(self, run: Run) -> Action | None:
        """A link that is held, or what keeps one machine from going on."""
        held = run.machine.fleet.held_links
        if held:
            return ReleaseTraffic(sender=held[0][0], receiver=held[0][1])
        for one in run.machine.living:
            action = one.run.obstacle
            if action is not None:
                undo: OnEngine = self.at(on=one.name, do=clause_of(action))
                return undo
        return None

    def also_due(self, run: Run) -> Sequence[Any]:
        """Nothing: machines take their own results."""
        del run
        return ()

    def finale(self, run: Run, turn: int) -> Sequence[Any]:
        """That of each machine."""
        return tuple((one.name, event) for one in run.machine.living for event in self.inner.finale(one.run, turn))

    def record_step(self, step: FleetStep, stepped: Any | None, machine: FleetMachine, error: str | None) -> Any:
        """The records of the machines that took a step."""
        del stepped
        last: dict[str, Any] = {}
        for one in machine.living:
            if one.run.stepped and one.run.records:
                last[one.name] = one.run.records[-1]
        return FleetRecord(step.now, last, error)

    def as_log(self, records: Sequence[FleetRecord], config: FleetConfig) -> StepLog:
        """All machines in one table."""
        shown: list[dict[str, Any]] = [{} for _ in records]
        for name in config.names:
            steps = [(index, one.last[name]) for index, one in enumerate(records) if name in one.last]
            log = self.inner.as_log([record for _, record in steps], self.config_of(config, name))
            for (index, _), step in zip(steps, log.steps, strict=True):
                shown[index][name] = step
        rows = zip(records, shown, strict=True)
        return StepLog(1, 1, tuple([merged(number, *row) for number, row in enumerate(rows, 1)]))

    def check_records(self, records: Sequence[Any]) -> None:
        del records  # Nothing more.

    def digests(self, run: Run) -> Iterator[bytes | None]:
        """Those of the machines, of the links and of what they know of one another. Raises UnreadableState."""
        yield _STATES.digest(run.step, run.arrived, run.clock.now(), [one.name for one in run.machine.living])
        yield self.fleet_digest(run)
        for one in run.machine.living:
            yield from self.inner.digests(one.run)

    @abstractmethod
    def fleet_digest(self, run: Run) -> bytes:
        """Of the links, and of what machines know of one another."""

    @abstractmethod
    def freeze(self, run: Run) -> Any:
        """All machines as they are now, with their links; None where they cannot be copied."""

    def plan_of(self, record: FleetRecord) -> object:
        """What each machine launched."""
        plans = {name: self.inner.plan_of(one) for name, one in record.last.items()}
        return {name: plan for name, plan in plans.items() if plan is not None} or None

    @property
    def mutant_names(self) -> tuple[str, ...]:
        """None: the bugs of one machine are searched in one machine."""
        return ()

    def settling(self, placed: Sequence[Placed], outcome: Any) -> list[Placed]:
        del placed
        return list(outcome.implied)

    def standalone_test(self, schedules: Sequence[Any], *, name: str) -> WrittenTest:
        """There is none. Raises ScriptDefinitionError."""
        del schedules, name
        raise ScriptDefinitionError(
            "`scripted replay` does a fleet's schedule again; write its test with t.engines(...)"
        )
