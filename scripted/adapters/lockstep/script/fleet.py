"""A fleet in a script: several engines with roles, the links between them, and one clock.

A step of the script is one step of each engine, in the order of their names in ``t.engines``. What an engine says to
another arrives in that one's next step, unless its link is held, slow or cut. Each engine keeps every promise of an
engine by itself, and each has the verbs of ``t``. In the sim tier only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from engine.config import EngineConfig
from engine.limits import Limits
from engine.messages import AbortAll, ContinueGeneration, FlushCache, Generate, GetStats, ReleasePressure
from engine.scheduler import StepResult, carry_out
from scripted.adapters.lockstep.script.delivery import check_answers
from scripted.adapters.lockstep.script.fleet_ends import EngineEnd
from scripted.adapters.lockstep.script.reset import HARNESS_CALL, RESET_BUDGET_STEPS
from scripted.adapters.lockstep.simulated.transfers import SimulatedTransfers
from scripted.adapters.lockstep.step_words import call_names, log_of
from scripted.core.violation import Violation
from scripted.errors import BadCall, NotIdle
from scripted.report.step_log import StepLog
from scripted.script import fleet
from scripted.script.wait import Steps

# The role of an engine, by the first letter of its name.
ROLES: Final = {"p": "prefill", "d": "decode", "e": "both"}
_COMPARED: Final = ("length", "stop")
_OF_A_SCRIPT: Final = "scripts "
_PASSED_FOR_NOBODY: Final = "time that passed for nobody"


class FleetEngine(EngineEnd):
    """One engine: ``t`` has its verbs, waits and queries; ``run`` is what is under it."""

    def __init__(self, name: str, run: Any, t: Any) -> None:
        super().__init__(name)
        self.run = run
        self.t = t
        self._previous: StepResult | None = None

    def step(self) -> None:
        """One step of the loop."""
        run = self.run
        run.begin_composing()
        step = run.compose(self._previous)
        result: StepResult = run.scheduler.step(step.events, step.now)
        carry_out(result, run.world.pipeline, run.world.clients)
        self._previous = result
        run.take_step(result)
        self.tell(result.replies)

    @property
    def arrived(self) -> list[Any]:
        return self.run.arrived  # type: ignore[no-any-return]

    @property
    def transfers(self) -> SimulatedTransfers:
        return self.run.world.transfers  # type: ignore[no-any-return]

    @property
    def limits(self) -> Limits:
        return self.run.scheduler.limits  # type: ignore[no-any-return]

    def begin_prompt(self, prompt: Generate) -> None:
        self.run.deliveries.append(prompt)
        super().begin_prompt(prompt)

    def end_prompt(self, rid: str) -> None:
        self.run.deliveries[:] = [one for one in self.run.deliveries if one.rid != rid]


class Fleet(fleet.Fleet[FleetEngine]):
    """The engines of one script by name; ``fleet["d0"]`` is the ``t`` of one of them. ``make`` makes one of a name."""

    def __init__(self, names: Sequence[str], make: Callable[[str], FleetEngine]) -> None:
        self._make = make
        self._turn = 0
        super().__init__([self._new(name) for name in names])

    def __getitem__(self, name: str) -> Any:
        return self.engine(name).t

    def restart(self, name: str) -> None:
        """A dead engine comes back as a new one; its ``t`` is another object: ask the fleet for it again."""
        self.engine(name)
        self.replace(self._new(name))

    def _new(self, name: str) -> FleetEngine:
        engine = self._make(name)
        engine.run.world.clients.choose_prefill = self._choose
        return engine

    def _choose(self) -> str | None:
        """The prefill engine of the next request: one after the other, of those that live."""
        alive = [engine.name for engine in self.living if engine.limits.prefills]
        self._turn += 1
        return alive[(self._turn - 1) % len(alive)] if alive else None

    # -- the end of the script --

    def finish(self) -> Steps:
        """End what the script left, and look at every engine that lives. Raises Violation, or NotIdle."""
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
            try:
                engine.run.oracle.at_end(engine.run.machine)
            except Violation as exc:
                raise Violation(f"engine {engine.name}: {exc}") from exc

    # -- looking --

    def logs(self, steps: int) -> tuple[tuple[str, StepLog], ...]:
        """The last steps of each engine, for a report."""
        runs = [(engine.name, engine.run) for engine in self.members]
        logs = [
            (name, log_of(run.records[-steps:], run.scheduler.limits, call_names(run.records))) for name, run in runs
        ]
        return tuple(logs)

    def loose_ends(self, ends: dict[str, int]) -> dict[str, int]:
        """What a script leaves with its own engine, and with these: a step of one of them is a step of the script."""
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
    def compared(self) -> int:
        """Outputs that were equal to those of the same requests run alone."""
        handles = [handle for engine in self.members for handle in engine.run.handles.all]
        return sum(handle.finish_reason in _COMPARED for handle in handles)


def role_of(name: str) -> str:
    """The role of an engine of this name. Raises BadCall for a name that says none."""
    role = ROLES.get(name[:1]) if isinstance(name, str) else None
    if role is None or not name.isidentifier():
        raise BadCall(
            f"an engine of a fleet is called p..., d... or e..., which prefill, decode or do both, got {name!r}"
        )
    return role


def config_of(name: str, config: EngineConfig) -> EngineConfig:
    """The configuration of an engine of a fleet. Raises ConfigError for one that no such role has."""
    return config.model_copy(update={"role": role_of(name)})
