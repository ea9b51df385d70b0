"""The machines of a fleet as one machine for the search; each adapter's oracle judges its machine in every step."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, Generic, Protocol, TypeAlias, runtime_checkable

import msgspec

from scripted.core.account import Account, Life
from scripted.core.action import Action, RunLike
from scripted.core.adapters import adapter_named
from scripted.core.clock import VirtualClock
from scripted.core.common_actions import ReleaseResults
from scripted.core.machine import ConfigT, EventT, OutputT, RecordT, StepT
from scripted.core.mutant import HasMutants
from scripted.core.oracle import Oracle, RequestedWork
from scripted.core.promises.waste import Preemptions
from scripted.core.protocol import Adapter, CopiesRuns, ShrinksConfigs
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import EMPTY_STEPS_LIMIT, Phase, Run
from scripted.core.schedule import Schedule
from scripted.core.violation import Violation
from scripted.report.step_log import Said, ShownBatch, ShownStep, ShowsSteps
from scripted.script.fleet import BaseFleet, Member


class FleetConfig(msgspec.Struct, Generic[ConfigT], frozen=True):
    """Engines by name, which share one configuration of their adapter except for their roles."""

    engine: ConfigT
    names: tuple[str, ...]


@runtime_checkable
class MemberAdapter(
    Adapter[ConfigT, EventT, StepT, OutputT, RecordT],
    ShrinksConfigs[ConfigT],
    ShowsSteps[ConfigT, RecordT],
    CopiesRuns,
    HasMutants,
    Protocol[ConfigT, EventT, StepT, OutputT, RecordT],
):
    """The adapter of one machine of a fleet: the fleet's loop takes its steps one by one."""

    def take_step(self, run: RunLike[ConfigT, EventT, StepT, OutputT, RecordT], step: StepT) -> OutputT:
        """Take one step as ``drive`` does."""
        ...

    def plan_of(self, record: RecordT) -> object:
        """Return the launch of a step in a form that can be compared across runs; None without a launch."""
        ...


@functools.cache
def member_adapter(name: str) -> MemberAdapter:
    """Return the adapter of this name if it fits machines of a fleet. Raises ScriptDefinitionError otherwise."""
    adapter = adapter_named(name)
    if not isinstance(adapter, MemberAdapter):
        raise ScriptDefinitionError(
            f"the adapter {name} makes no machine of a fleet: it must have take_step(), and be copied and shown"
        )
    return adapter


class MemberRun(Run[ConfigT, EventT, StepT, OutputT, RecordT]):
    """A run that takes one step at a time, and none while a real server would wait."""

    def __init__(self, config: ConfigT, of: str, clock: VirtualClock, *, record: bool) -> None:
        super().__init__(Schedule(config, (), of), record=record)
        self.clock = clock
        # Whether this machine took part in the fleet's last step.
        self.stepped = False
        self._interventions: list[EventT] = []

    def give(self, event: EventT) -> None:
        self.arrived.append(event)

    def happened(self, event: EventT) -> None:
        self._interventions.append(event)

    def advance(self) -> bool:
        """Take the next step if an event, the last step or a deadline requires it. Raises Violation.

        Returns whether it was taken.
        """
        self._collect_events()
        self.stepped = bool(self._events) or self._is_due
        if self.stepped:
            self._take_step()
        return self.stepped

    def _collect_events(self) -> None:
        """Collect the events of the next step: interventions, results, then messages."""
        self.begin_composing()
        self.step += 1
        self._events.extend(self._interventions)
        self._interventions.clear()
        self._take_due()
        self._events += self.adapter.also_due(self)
        self._events += self.arrived
        self.arrived.clear()

    def _take_step(self) -> None:
        """Take a step with the collected events and judge it. A scheduler that raises leaves the record of its step."""
        self.phase = Phase.ADAPTER
        step = self.adapter.new_step(tuple(self._events), self.clock.now())
        try:
            output = member_adapter(self._schedule.of).take_step(self, step)
        except Exception as exc:
            self.__exit__(type(exc), exc, exc.__traceback__)
            raise
        self._previous = output
        self._judge(output)
        self.phase = Phase.HARNESS

    @property
    def is_working(self) -> bool:
        """Whether it computes, or its last step was given something or did something."""
        did_something = self.stepped and self._previous is not None and not self._is_empty(self._previous)
        return did_something or len(self.results) > 0

    @property
    def _is_due(self) -> bool:
        previous = self._previous
        if previous is None:
            return False
        return previous.again or (previous.deadline is not None and previous.deadline <= self.clock.now())

    @property
    def is_busy(self) -> bool:
        """Whether its next step has something to do without help."""
        waits = len(self.results) > 0 and not self._holding and not self.results.stalled
        return self.stepped or bool(self.arrived) or waits

    @property
    def obstacle(self) -> Action | None:
        """Return the action that removes the next obstacle; None without one."""
        return ReleaseResults() if self._holding else super().obstacle


# Fewer than a run allows: machines that go round in circles, for instance because each needs a message on a held link,
# count as stuck, so that the run releases the link.
SILENT_STEPS_LIMIT: Final = EMPTY_STEPS_LIMIT // 2


class FleetOutput(msgspec.Struct, frozen=True):
    """The output of one step of all machines, each of which handles its own microbatches."""

    replies: tuple[object, ...]
    again: bool
    deadline: float | None
    microbatch: None = None


class SearchedMember(Member):
    """One machine of a fleet, and its run."""

    run: MemberRun

    @property
    def is_busy(self) -> bool:
        """Whether its next step has something to do without help."""
        return self.run.is_busy

    @property
    def is_quiet(self) -> bool:
        """Whether it has no work left for its clients or for other machines."""
        is_idle: bool = self.run.machine.is_idle
        return is_idle and self.run.is_settled and not self.run.arrived

    def check_quiet(self) -> None:
        """Check its knowledge of the others once nothing is in transit. Raises Violation."""


class FleetMachine:
    """All machines, frozen between two steps. ``of`` is the fleet adapter that makes them."""

    depth = 1

    def __init__(self, of: str, config: FleetConfig, *, record: bool) -> None:
        self._of = of
        self._config = config
        self._record = record
        # Consecutive steps without a reply to a client or a message to a machine.
        self._silent = 0
        # How many machines have been made.
        self.made = 0
        self.clock = VirtualClock()
        self.fleet: BaseFleet[SearchedMember] = BaseFleet([self._new(name) for name in config.names])

    @property
    def living(self) -> list[SearchedMember]:
        """The machines that have not been killed."""
        return self.fleet.living

    def engine(self, name: str) -> SearchedMember:
        return self.fleet.engine(name)

    def restart(self, name: str) -> None:
        """Replace a dead machine with a new one."""
        self.fleet.replace(self._new(name))

    def _new(self, name: str) -> SearchedMember:
        self.made += 1
        return fleet_adapter(self._of).new_member(self, self._config, name, record=self._record)

    def step(self, events: Sequence[FleetEvent], now: float) -> FleetOutput:
        """Take one step of each machine; the events are the last ones of every run. Raises Violation."""
        self.clock.advance(now - self.clock.now())
        for name, event in events:
            self.engine(name).run.give(event)
        self.fleet.step()
        self._let_go()
        stepped = [one.run.previous for one in self.living if one.run.stepped]
        last = [one.run.previous for one in self.living if one.run.previous is not None]
        deadlines = [one.deadline for one in last if one.deadline is not None]
        replies = tuple(reply for one in stepped if one is not None for reply in one.replies)
        self._silent = 0 if replies or self.fleet.has_heard else self._silent + 1
        return FleetOutput(replies, self.is_moving, min(deadlines, default=None))

    def stir(self) -> None:
        """Note an event outside of steps."""
        self._silent = 0

    @property
    def is_working(self) -> bool:
        """Whether a message has come, a machine has taken or launched something, or computes."""
        return self.fleet.has_heard or any(one.run.is_working for one in self.living)

    @property
    def is_moving(self) -> bool:
        """Whether the next step has something to do by itself."""
        is_busy = self._silent < SILENT_STEPS_LIMIT and any(one.is_busy for one in self.living)
        return self.fleet.is_moving or is_busy

    def _let_go(self) -> None:
        """Remove drained machines without work as if they had died; nothing may be open there."""
        for one in self.living:
            if one.is_draining and one.is_quiet and not self.fleet.carries(one.name):
                one.run.oracle.at_rest(one.run.machine)
                self.fleet.kill(one.name)

    @property
    def is_idle(self) -> bool:
        return all(one.run.machine.is_idle and not one.run.arrived for one in self.living)

    def counts(self) -> Mapping[str, int]:
        """Return the counts of all machines, with their names."""
        return {f"{one.name}_{name}": n for one in self.living for name, n in one.run.machine.counts().items()}


class NoDevice:
    """Stands in for the device; each machine has its own."""

    def next_completion(self, timeout_s: float | None) -> None:
        """Return None: the machines have their own results."""
        del timeout_s


# An event, with the name of its machine.
FleetEvent: TypeAlias = tuple[str, object]


class FleetStep(msgspec.Struct, frozen=True):
    events: tuple[FleetEvent, ...]
    now: float


class FleetRecord(msgspec.Struct, Generic[RecordT], frozen=True):
    """``last`` has the records of the machines that took a step."""

    now: float
    last: dict[str, RecordT]
    error: str | None


def merged(number: int, record: FleetRecord, shown: Mapping[str, ShownStep]) -> ShownStep:
    """Merge the steps of all machines into one row that names them."""
    arrived: list[Said] = []
    answered: list[Said] = []
    launched: list[str] = []
    for name, step in shown.items():
        arrived += _named(name, step.arrived)
        answered += _named(name, step.answered)
        launched += [] if step.launched is None else [f"{name}: {step.launched.in_full}"]
    batch = ShownBatch(id=number, kind="steps", order="; ".join(launched)) if launched else None
    return ShownStep(
        step=number,
        now=record.now,
        arrived=tuple(arrived),
        launched=batch,
        answered=tuple(answered),
        error=record.error,
    )


def _named(name: str, said: Sequence[Said]) -> list[Said]:
    return [Said(text=f"{name}: {one.in_full}", kind=one.kind) for one in said]


class _Requests(Account):
    """The requests of all living machines, each rid prefixed with its machine's name."""

    def __init__(self, machine: FleetMachine) -> None:
        self._machine = machine
        self.step = 0
        self.moved = False
        # Each machine's own account judges its preemptions.
        self.preemptions = Preemptions(1, 1)

    @property
    def live(self) -> dict[str, Life]:  # type: ignore[override]
        members = self._machine.living
        return {f"{one.name}:{rid}": life for one in members for rid, life in one.run.oracle.account.live.items()}

    @property
    def lives(self) -> list[Life]:  # type: ignore[override]
        return [life for one in self._machine.living for life in one.run.oracle.account.lives]


class FleetOracle(Oracle[FleetEvent, FleetOutput, FleetMachine, NoDevice]):
    """Judges the end of a fleet's run, and stalls; each machine is judged in its own step."""

    def __init__(self, machine: FleetMachine) -> None:
        super().__init__(depth=1, batch_requests=1, batch_tokens=1)
        self._machine = machine
        self.account = _Requests(machine)

    @property
    def is_settled(self) -> bool:
        return all(one.run.is_settled for one in self._machine.living)

    @property
    def could_go_on(self) -> Iterable[Life]:
        # An event since the last step, such as a death, may have moved them.
        members = () if self._machine.is_moving else self._machine.living
        return [life for one in members for life in one.run.oracle.could_go_on]

    @property
    def work_left(self) -> None:
        """Return None, unknown: requests wait for other machines and for links."""

    @property
    def requested_work(self) -> RequestedWork:
        work = RequestedWork(0, "", 0)
        for one in self._machine.living:
            work += one.run.oracle.requested_work
        return work

    @property
    def names(self) -> Iterable[str]:
        """Return the rids of all requests of all machines."""
        return [rid for one in self._machine.living for rid in one.run.oracle.names]

    def is_live(self, rid: str) -> bool:
        return any(one.run.is_live(rid) for one in self._machine.living)

    def after_step(
        self, events: Sequence[FleetEvent], stepped: FleetOutput, machine: FleetMachine, device: NoDevice
    ) -> None:
        """Do nothing: each machine was judged in its step."""

    def at_rest(self, machine: FleetMachine) -> None:
        """Judge the fleet once every request has ended, with the caches still filled. Raises Violation."""
        self._ask(machine, lambda one: one.run.oracle.at_rest(one.run.machine))
        self._ask(machine, lambda one: one.check_quiet())

    def at_end(self, machine: FleetMachine) -> None:
        """Judge the end: machines are idle and flushed, outputs equal the requests run alone. Raises Violation."""
        self._ask(machine, lambda one: one.run.oracle.at_end(one.run.machine))

    def _ask(self, machine: FleetMachine, question: Callable[[SearchedMember], None]) -> None:
        for one in machine.living:
            try:
                question(one)
            except Violation as exc:
                raise Violation(f"engine {one.name}: {exc}", inner=exc) from exc


FleetRun: TypeAlias = RunLike[
    FleetConfig, FleetEvent, FleetStep, FleetOutput, FleetRecord, FleetMachine, NoDevice, FleetOracle
]


@runtime_checkable
class AdapterOfFleets(Adapter[FleetConfig, FleetEvent, FleetStep, FleetOutput, FleetRecord], Protocol):
    """An adapter whose machine is a fleet of machines of the adapter ``inner``."""

    inner_actions: tuple[type[Action], ...]
    begin: Callable[..., Action]
    at: Callable[..., Action]

    @property
    def inner(self) -> MemberAdapter: ...

    def config_of(self, config: FleetConfig, name: str) -> object:
        """Return the configuration of one machine. Raises its adapter's errors."""
        ...

    def new_member(self, machine: FleetMachine, config: FleetConfig, name: str, *, record: bool) -> SearchedMember:
        """Make a new machine of this name."""
        ...


@functools.cache
def fleet_adapter(name: str) -> AdapterOfFleets:
    """Return the fleet adapter of this name. Raises ScriptDefinitionError for any other."""
    adapter = adapter_named(name)
    if not isinstance(adapter, AdapterOfFleets):
        raise ScriptDefinitionError(f"{name} is not an adapter of fleets; make one with scripted.fleets.adapter")
    return adapter
