"""A fleet in a script: several engines with roles, the links between them, and one clock.

A step of the script is one step of each engine, in the order of their names in ``t.engines``. A message arrives in the
receiver's next step, unless the link is held, slow or cut. Each engine keeps every promise of a single engine, and has
the verbs of ``t``. In the server tier messages also cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import msgspec

from engine.core.config import EngineConfig
from engine.core.messages import (
    AbortAll,
    ContinueGeneration,
    FlushCache,
    Generate,
    GetStats,
    PrefillDropped,
    PrefillFailed,
    PrefillWanted,
    ReleasePressure,
)
from engine.core.scheduler import StepResult
from scripted.core.errors import NotIdle
from scripted.core.violation import Violation
from scripted.report.step_log import EngineLog, FleetLog, Message, Said, ShownStep, StepLog
from scripted.script.fleet import BaseFleet, role_in
from scripted.script.wait import Steps
from scripted_lockstep.script.fleet_traffic import ConnectedEngine
from scripted_lockstep.script.handle import RequestHandle
from scripted_lockstep.script.history import check_answers
from scripted_lockstep.script.reset import HARNESS_CALL, RESET_BUDGET_STEPS
from scripted_lockstep.simulated.transfers import ConfirmedPages
from scripted_lockstep.step_words import call_names, log_of

if TYPE_CHECKING:
    from scripted.script.context import BaseContext

# The role of an engine, by the first letter of its name.
ROLES: Final = {"p": "prefill", "d": "decode", "e": "both"}
_COMPARED: Final = ("length", "stop")
_OF_A_SCRIPT: Final = "scripts "
_PASSED_FOR_NOBODY: Final = "time that passed for nobody"
_LOST: Final = "the connection broke before the answer ended"


class FleetEngine(ConnectedEngine):
    """One engine; ``t`` has its verbs, waits and queries."""

    def __init__(self, name: str, run: Any, t: BaseContext) -> None:
        super().__init__(name, run)
        self.t = t
        self._previous: StepResult | None = None
        # Messages that arrived in this step.
        self.heard: list[object] = []
        # The fleet's step before this engine's first one, and a dead engine's last one.
        self.since = self.died = 0

    def step(self) -> None:
        """One step of the loop."""
        run = self.run
        run.begin_composing()
        step = run.compose(self._previous)
        result: StepResult = run.scheduler.step(step.events, step.now)
        run.world.carry_out(step, result)
        self._previous = result
        run.take_step(result)
        self.tell(result.replies)

    def receive(self, sender: str, message: object) -> None:
        self.heard.append(message)
        super().receive(sender, message)

    def begin_prompt(self, prompt: Generate) -> None:
        self.run.deliveries.append(prompt)
        super().begin_prompt(prompt)

    def end_prompt(self, rid: str) -> None:
        self.run.deliveries[:] = [one for one in self.run.deliveries if one.rid != rid]


@dataclass(slots=True)
class _Sent:
    """A message from one engine to another, with the steps in which it was sent and arrived."""

    ends: tuple[str, str]
    message: Any
    step: int
    arrived: int | None = None


class Fleet(BaseFleet[FleetEngine]):
    """The engines of one script by name; ``fleet["d0"]`` is the ``t`` of an engine. ``make`` makes one by name."""

    def __init__(self, names: Sequence[str], make: Callable[[str], FleetEngine]) -> None:
        self._make = make
        self._turn = 0
        self._sent: list[_Sent] = []
        # The logs of restarted engines.
        self._past: list[EngineLog] = []
        super().__init__([self._new(name) for name in names])

    def __getitem__(self, name: str) -> Any:
        return self.engine(name).t

    def kill(self, name: str) -> None:
        """Kill an engine and lose its state. Its clients and the other engines see the connection break."""
        engine = self.engine(name)
        if not engine.is_dead:
            engine.died = self._step
            engine.wires.kill(engine)
            for handle in engine.run.handles.all:
                if not handle.client.closed:
                    handle.client.fail(_LOST)
            for call in engine.run.handles.calls:
                if not call.done:
                    call.answer(0, _LOST)
        super().kill(name)

    def restart(self, name: str) -> None:
        """Restart a dead engine as a new one, whose ``t`` is another object: get it from the fleet again."""
        before = self.engine(name)
        after = self._new(name) if before.is_dead else before
        self.replace(after)
        self._past.append(self._log_of(before))
        after.since = self._step

    def step(self) -> None:
        super().step()
        for engine in self.members:
            for message in engine.heard:
                next(one for one in self._sent if one.message is message).arrived = self._step
            engine.heard.clear()

    def _new(self, name: str) -> FleetEngine:
        engine = self._make(name)
        engine.run.world.clients.choose_prefill = self._choose
        engine.run.member_of = self
        return engine

    def _choose(self) -> str | None:
        """Choose the prefill engine of the next request, in turn among the live ones."""
        alive = [engine.name for engine in self.living if engine.limits.prefills]
        self._turn += 1
        return alive[(self._turn - 1) % len(alive)] if alive else None

    def _send(self, member: FleetEngine, receiver: str, message: object) -> None:
        self._sent.append(_Sent((member.name, receiver), message, self._step))
        super()._send(member, receiver, message)

    # -- the end of the script --

    def finish(self) -> Steps:
        """End everything that the script left open, and check every live engine. Raises Violation, or NotIdle."""
        self.release_all()
        living = self.living
        for engine in living:
            engine.run.let_go()
            engine.run.inject(ReleasePressure())
            engine.run.arrived += [ContinueGeneration(call_id=HARNESS_CALL), AbortAll()]
        yield
        for _ in range(RESET_BUDGET_STEPS):
            if all(engine.run.scheduler.is_fully_idle and not engine.run.arrived for engine in living):
                break
            yield
        for engine in living:
            busy = engine.run.scheduler.books.what_is_busy()
            if not engine.run.scheduler.is_fully_idle:
                raise NotIdle(f"engine {engine.name} did not get idle after everything was aborted: {busy}")
            engine.run.oracle.at_rest(engine.run.machine)
            check_answers(engine.run.handles.all)
            engine.run.inject(FlushCache(call_id=HARNESS_CALL), GetStats(call_id="stats"))
        yield
        for engine in living:
            oracle = engine.run.oracle
            try:
                if engine.run.world.tier == "sim":
                    oracle.at_end(engine.run.machine)
                else:  # The output of a real model is compared only on its own engine.
                    oracle.check_end(engine.run.scheduler)
            except Violation as exc:
                raise Violation(f"engine {engine.name}: {exc}", inner=exc) from exc

    # -- looking --

    def causes(self, run: Any) -> Iterator[str]:
        """Yield the reasons why engines other than the one of ``run`` make no progress, each with its remedy."""
        for (one, other), link in self.links.items():
            if link.keeps_some:
                yield f"the link from {one} to {other} is held, until fleet.release({one!r}, {other!r})"
            elif link.is_cut and self.names.index(one) < self.names.index(other):
                yield f"the link between {one} and {other} is cut, until fleet.heal({one!r}, {other!r})"
        for engine in self.living:
            for cause in engine.run.own_causes() if engine.run is not run else ():
                if cause != run.idle_words:
                    yield f"engine {engine.name}, whose t is fleet[{engine.name!r}]: {cause}"

    def log(self, steps: int | None = None) -> FleetLog:
        """Return all steps of all engines and their messages, or the last ``steps``."""
        first = 0 if steps is None else self._step - steps
        logs = [*self._past, *map(self._log_of, self.members)]
        logs = [EngineLog(one.name, _since(one.log, first), one.notes) for one in logs]
        logs.sort(key=lambda one: self.names.index(one.name))
        under_way = {id(message) for link in self.links.values() for message in link.on_its_way}
        messages = [
            Message(
                sender=one.ends[0],
                receiver=one.ends[1],
                text=_words(one.message),
                sent=one.step,
                arrived=one.arrived,
                lost=one.arrived is None and id(one.message) not in under_way,
            )
            for one in self._sent
            if one.step > first
        ]
        return FleetLog(tuple(logs), tuple(messages))

    def _log_of(self, engine: FleetEngine) -> EngineLog:
        """Return the steps of an engine since it joined, numbered as the fleet's steps."""
        run, since = engine.run, engine.since
        log = log_of(run.records, run.scheduler.limits, call_names(run.records))
        steps = [msgspec.structs.replace(step, step=step.step + since) for step in log.steps]
        if engine.is_dead:
            steps.append(ShownStep(step=engine.died + 1, arrived=(Said(text="KILLED", kind="bad"),)))
        noted = (*engine.t.notes, *engine.t.line_notes())
        notes = [msgspec.structs.replace(note, step=note.step + since) for note in noted]
        return EngineLog(engine.name, StepLog(log.stages, log.depth, tuple(steps)), tuple(notes))

    def loose_ends(self, ends: dict[str, int]) -> dict[str, int]:
        """Count the ineffective actions of the script's own engine and of these; a step of any engine counts as the
        script's.
        """
        # Time passes for all engines.
        counted = {name: count for name, count in ends.items() if name != _PASSED_FOR_NOBODY}
        for engine in self.members:
            for name, count in engine.t.loose_ends().items():
                if not name.startswith(_OF_A_SCRIPT) and name != _PASSED_FOR_NOBODY:
                    counted[name] = counted.get(name, 0) + count
        runs = [engine.run for engine in self.members]
        if any(run.did_something(record) for run in runs for record in run.records):
            counted = {name: count for name, count in counted.items() if not name.startswith(_OF_A_SCRIPT)}
        return counted

    @property
    def handles(self) -> list[RequestHandle]:
        """The requests of all engines."""
        return [handle for engine in self.members for handle in engine.run.handles.all]

    @property
    def compared(self) -> int:
        """Outputs of simulated engines that equal the outputs of the same requests run alone."""
        return sum(handle.finish_reason in _COMPARED for handle in self.handles)


def _since(log: StepLog, first: int) -> StepLog:
    return StepLog(log.stages, log.depth, tuple([step for step in log.steps if step.step > first]))


def _words(said: Any) -> str:
    """Describe a message between engines in a few words."""
    match said:
        case PrefillWanted():
            return f"wants {len(said.ids)} tokens of {said.rid}, transfer {said.transfer}"
        case PrefillDropped():
            return f"drops transfer {said.transfer}"
        case PrefillFailed():
            return f"transfer {said.transfer} FAILED"
        case ConfirmedPages():
            return f"{'drops' if said.error else 'confirms'} pages, transfer {said.sending} there"
    return f"{len(said.contents)} pages of transfer {said.transfer}, from {said.first}"


def role_of(name: str) -> str:
    """Return the role of an engine of this name. Raises BadCall for a name without one."""
    return role_in(ROLES, name)


def config_of(name: str, config: EngineConfig) -> EngineConfig:
    """Return the configuration of an engine of a fleet. Raises ConfigError if its role cannot have it."""
    return config.model_copy(update={"role": role_of(name)})
