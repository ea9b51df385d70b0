"""The base of fleet adapters: several machines of another adapter, their links and one clock, as one machine.

A schedule applies the actions of one machine to any of them (``at on=d0 do="abort a"``), and has actions on links and
whole machines. The other adapter answers every question about one machine.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import ClassVar, Final

from scripted.core.action import Action
from scripted.core.base_adapter import BaseAdapter
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed_action import Placed, parse_action
from scripted.core.protocol import ChecksAlike, ConfigValue, Freezer, SkipsChecks, violations_of
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule
from scripted.core.states import StateReader
from scripted.fleets.actions import TRAFFIC_ACTIONS, OnEngine, ReleaseTraffic, actions_on_engines, clause_of
from scripted.fleets.machine import (
    FleetConfig,
    FleetEvent,
    FleetMachine,
    FleetOracle,
    FleetOutput,
    FleetRecord,
    FleetRun,
    FleetStep,
    MemberAdapter,
    NoDevice,
    SearchedMember,
    member_adapter,
    merged,
)
from scripted.report.step_log import ShownStep, StepLog
from scripted.script.fleet import role_in
from scripted.search.generated import Space

# The machines for which a schedule of one machine is retold, the machine of its events, and their largest delay.
_STAGES: Final = ((("d0",), "d0", 0), (("p0", "d0"), "p0", 4), (("p0", "d0"), "d0", 14))


class FleetAdapter(
    BaseAdapter[FleetConfig, FleetEvent, FleetStep, FleetOutput, FleetRecord, FleetMachine, NoDevice, FleetOracle]
):
    """Implements the adapter protocol for fleets of machines of the adapter ``of``.

    ``roles`` are the roles by the first letter of a machine's name. ``inner_actions`` are the actions on one machine
    that a fleet has; ``more_actions`` are further ones for this kind of fleet.
    """

    of: str
    roles: Mapping[str, str]
    space: Space
    workloads: Mapping[str, str]
    inner_actions: tuple[type[Action], ...]
    states = StateReader()
    fixed_settings: ClassVar[tuple[str, ...]] = ("engines",)
    resuming: ClassVar[None] = None
    undoing: ClassVar[tuple[Action, ...]] = ()

    def __init__(self, more_actions: Sequence[type[Action]] = ()) -> None:
        self.begin, self.at = actions_on_engines(self.name)
        self.actions: tuple[type[Action], ...] = (self.begin, self.at, *TRAFFIC_ACTIONS, *more_actions, AdvanceClock)

    @property
    def inner(self) -> MemberAdapter:
        """Return the adapter of one machine."""
        return member_adapter(self.of)

    @property
    def packages(self) -> tuple[str, ...]:
        return self.inner.packages

    @property
    def violations(self) -> tuple[type[Exception], ...]:
        return violations_of(self.inner)

    # -- defined by each kind of fleet --

    @abstractmethod
    def config_of(self, config: FleetConfig, name: str) -> object:
        """Return the configuration of one machine. Raises its adapter's errors."""

    @abstractmethod
    def new_member(self, machine: FleetMachine, config: FleetConfig, name: str, *, record: bool) -> SearchedMember:
        """Make a new machine with this name."""

    # -- configurations --

    def read_config(self, words: Mapping[str, str]) -> FleetConfig:
        """Read ``engines=p0,d0`` and the settings of one machine. Raises ConfigError, BadCall."""
        values = dict(words)
        names = tuple(values.pop("engines", "p0,d0").split(","))
        config = FleetConfig(self.inner.read_config(values), names)
        for name in names:
            role_in(self.roles, name)
        return config

    def config_words(self, config: FleetConfig) -> Mapping[str, ConfigValue]:
        return {"engines": ",".join(config.names), **self.inner.config_words(config.engine)}

    def smaller_configs(self, config: FleetConfig) -> Iterator[FleetConfig]:
        for engine in self.inner.smaller_configs(config.engine):
            smaller = FleetConfig(engine, config.names)
            with suppress(ValueError):
                for name in config.names:
                    self.config_of(smaller, name)
                yield smaller

    def limits_of(self, config: FleetConfig) -> object:
        return self.inner.limits_of(self.config_of(config, next(name for name in config.names if name[0] != "p")))

    # -- known defects of one machine --

    @property
    def part_adapter(self) -> str:
        return self.of

    def retold(self, schedule: Schedule) -> Iterator[Schedule]:
        """Yield the schedule as one of a fleet: for a decoding machine alone, then for each role, with later events.

        A request reaches each machine of a pair some steps after its beginning. Yields nothing for a schedule with an
        action or a setting that a fleet's machines lack.
        """
        events = [one for one in schedule.placed if not one.action.is_start]
        for names, on, latest in _STAGES:
            for delay in range(latest + 1 if events else 1):
                with suppress(ScriptDefinitionError, ValueError):
                    yield self._as_script(schedule, names, on, delay)

    def _as_script(self, schedule: Schedule, names: tuple[str, ...], on: str, delay: int) -> Schedule:
        """Return the schedule with its requests at the decoding machine, and other actions on ``on``, later."""
        words = {name: str(value) for name, value in schedule.adapter.config_words(schedule.config).items()}
        config = FleetConfig(self.inner.read_config(words), names)
        for name in names:
            self.config_of(config, name)
        placed = []
        for one in schedule.placed:
            clause = clause_of(one.action)
            if one.action.is_start:
                placed.append(Placed(one.step, self.begin(on=names[-1], do=clause)))
            elif isinstance(one.action, AdvanceClock):
                placed.append(Placed(one.step + delay, one.action))
            else:
                parse_action(clause, self.inner_actions)
                placed.append(Placed(one.step + delay, self.at(on=on, do=clause)))
        return Schedule(config, (), self.name).with_placed(placed)

    # -- a run --

    def new_parts(self, config: FleetConfig, *, record: bool) -> tuple[FleetMachine, NoDevice, FleetOracle]:
        machine = FleetMachine(self.name, config, record=record)
        return machine, NoDevice(), FleetOracle(machine)

    def new_step(self, events: tuple[FleetEvent, ...], now: float) -> FleetStep:
        return FleetStep(events, now)

    def take_step(self, run: FleetRun, step: FleetStep) -> FleetOutput:
        """Take one step of all machines."""
        return run.machine.step(step.events, step.now)

    @property
    def checks_alike(self) -> bool:
        """Return whether every run of one machine makes the same checks."""
        inner = self.inner
        return isinstance(inner, ChecksAlike) and inner.checks_alike

    def leave_out(self, run: FleetRun) -> None:
        inner = self.inner
        if isinstance(inner, SkipsChecks):
            for one in run.machine.fleet.members:
                inner.leave_out(one.run)

    def what_is_busy(self, run: FleetRun) -> str:
        return "; ".join(f"{one.name}: {self.inner.what_is_busy(one.run)}" for one in run.machine.living)

    def where(self, run: FleetRun, rid: str | None) -> tuple[str, str]:
        """Return the states of all machines."""
        places = [(one.name[0], self.inner.where(one.run, rid)[0]) for one in run.machine.living]
        return "; ".join(sorted({f"{role}: {place}" for role, place in places})), str(len(places))

    def obstacle(self, run: FleetRun) -> Action | None:
        """Return the action against a held link, or against one machine's obstacle."""
        held = run.machine.fleet.held_links
        if held:
            return ReleaseTraffic(sender=held[0][0], receiver=held[0][1])
        for one in run.machine.living:
            action = one.run.obstacle
            if action is not None:
                undo: OnEngine = self.at(on=one.name, do=clause_of(action))
                return undo
        return None

    def finale(self, run: FleetRun, turn: int) -> Sequence[FleetEvent]:
        """Return the last events of each machine."""
        return tuple((one.name, event) for one in run.machine.living for event in self.inner.finale(one.run, turn))

    def record_step(
        self, step: FleetStep, stepped: FleetOutput | None, machine: FleetMachine, error: str | None
    ) -> FleetRecord:
        """Record the machines that took a step."""
        del stepped
        last: dict[str, object] = {}
        for one in machine.living:
            if one.run.stepped and one.run.records:
                last[one.name] = one.run.records[-1]
        return FleetRecord(step.now, last, error)

    def as_log(self, records: Sequence[FleetRecord], config: FleetConfig) -> StepLog:
        """Show all machines in one log."""
        shown: list[dict[str, ShownStep]] = [{} for _ in records]
        for name in config.names:
            steps = [(index, one.last[name]) for index, one in enumerate(records) if name in one.last]
            log = self.inner.as_log([record for _, record in steps], self.config_of(config, name))
            for (index, _), step in zip(steps, log.steps, strict=True):
                shown[index][name] = step
        rows = zip(records, shown, strict=True)
        return StepLog(1, 1, tuple([merged(number, *row) for number, row in enumerate(rows, 1)]))

    def digests(self, run: FleetRun) -> Iterator[bytes | None]:
        """Yield the digests of the machines, the links and the machines' knowledge of each other.

        Raises UnreadableState.
        """
        yield self.states.digest(run.step, run.arrived, run.clock.now(), [one.name for one in run.machine.living])
        yield self.fleet_digest(run)
        for one in run.machine.living:
            yield from self.inner.digests(one.run)

    @abstractmethod
    def fleet_digest(self, run: FleetRun) -> bytes:
        """Return the digest of the links and of the machines' knowledge of each other."""

    @abstractmethod
    def freeze(self, run: FleetRun) -> Freezer | None:
        """Freeze all machines with their links; None if they cannot be copied."""

    def plan_of(self, record: FleetRecord) -> object:
        """Return the launch of each machine."""
        plans = {name: self.inner.plan_of(one) for name, one in record.last.items()}
        return {name: plan for name, plan in plans.items() if plan is not None} or None

    @property
    def mutant_names(self) -> tuple[str, ...]:
        """Return no names: a search for a machine's mutants uses single machines."""
        return ()

    def switched_on(self, mutant: str | None) -> AbstractContextManager[None]:
        """Switch on a mutant of one machine."""
        return self.inner.switched_on(mutant)

    def bugs_met(self, codes: Container[int]) -> Sequence[str]:
        return self.inner.bugs_met(codes)
