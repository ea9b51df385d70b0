"""The engines of a fleet as one machine of the search. Each is judged by the oracle of an engine in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from engine.messages import FlushCache, GetStats
from scripted.adapters.lockstep.actions import (
    ReleaseResults,
    Relieve,
    ResumeServing,
    ResumeStage,
    Update,
    WakeServing,
)
from scripted.adapters.lockstep.engine_oracle import EngineOracle
from scripted.adapters.lockstep.fleets.config import FleetConfig
from scripted.adapters.lockstep.script.fleet import Fleet, FleetEngine
from scripted.adapters.lockstep.script.reset import HARNESS_CALL
from scripted.adapters.lockstep.sim.runner import new_fleet
from scripted.core.action import Action
from scripted.core.clock import VirtualClock


class FleetOutput(msgspec.Struct, frozen=True):
    """The output of one step of all engines, which answer for their own microbatches."""

    replies: tuple[Any, ...]
    again: bool
    deadline: float | None
    microbatch: None = None


class FleetMachine:
    """All engines, frozen between two steps."""

    depth = 1

    def __init__(self, config: FleetConfig) -> None:
        self._clock = VirtualClock()
        self.fleet: Fleet = new_fleet(config.engine, config.names, self._clock)
        for engine in self.engines:
            _judge_cheaply(engine)

    @property
    def engines(self) -> tuple[FleetEngine, ...]:
        """All of them, in their order."""
        return tuple(self.fleet.engine(name) for name in self.fleet.names)

    @property
    def living(self) -> list[FleetEngine]:
        """Those that were not killed."""
        return [engine for engine in self.engines if not engine.is_dead]

    def engine(self, name: str) -> FleetEngine:
        """The engine of this name."""
        return self.fleet.engine(name)

    def restart(self, name: str) -> None:
        """A dead engine comes back."""
        self.fleet.restart(name)
        _judge_cheaply(self.engine(name))

    def step(self, events: Sequence[Any], now: float) -> FleetOutput:
        """One step of each engine; the only event is the end of the run. Raises Violation."""
        self._clock.advance(now - self._clock.now())
        if events:
            for engine in self.living:
                engine.run.inject(FlushCache(call_id=HARNESS_CALL), GetStats(call_id="stats"))
        self.fleet.step()
        outputs = [engine.previous for engine in self.living if engine.previous is not None]
        deadlines = [one.deadline for one in outputs if one.deadline is not None]
        replies = tuple(reply for one in outputs for reply in one.replies)
        return FleetOutput(replies, self._is_moving(), min(deadlines, default=None))

    def _is_moving(self) -> bool:
        """The next step has something to do, without any event."""
        return self.fleet.is_moving or any(_is_busy(engine) for engine in self.living)

    @property
    def is_idle(self) -> bool:
        return all(engine.run.is_fully_idle for engine in self.living)

    def counts(self) -> Mapping[str, int]:
        """What the schedulers say of themselves, by engine."""
        return {f"{e.name}_{name}": count for e in self.engines for name, count in e.run.machine.counts().items()}


def _judge_cheaply(engine: FleetEngine) -> None:
    """All that the search checks of one engine in every step."""
    engine.run.oracle = EngineOracle(engine.run.scheduler.limits, restores=False, pages=False)


def _is_busy(engine: FleetEngine) -> bool:
    run, previous = engine.run, engine.previous
    if run.arrived or (previous is not None and (previous.again or previous.transfers)):
        return True
    if len(run.results) and not run.results.is_holding and not run.results.stalled:
        return True
    return bool(run.world.transfers.ends_soon)


class NoDevice:
    """Each engine has its own pipeline."""

    def launch(self, microbatch: Any) -> None:
        """Nothing is launched here."""

    def next_completion(self, timeout_s: float | None) -> Any:
        """None: results are those of the engines."""
        del timeout_s


def what_keeps(engine: FleetEngine) -> Action | None:
    """What undoes the next thing that keeps an engine from going on."""
    run, scheduler = engine.run, engine.run.scheduler
    if run.results.is_holding:
        return ReleaseResults()
    if run.results.stalled:
        return ResumeStage(stage=min(run.results.stalled))
    if scheduler.books.sleep_level:
        return Update() if scheduler.books.sleep_level > 1 else WakeServing()
    if run.machine.is_pressed:
        return Relieve()
    if scheduler.books.paused is not None and not (run.oracle.is_settled and not engine.serving):
        return ResumeServing()
    return None
