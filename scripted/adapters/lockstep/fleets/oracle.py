"""The oracle of a fleet: it asks those of its engines."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripted.adapters.lockstep.fleets.machine import FleetMachine
from scripted.core.oracle import Oracle


class FleetOracle(Oracle):
    """Asks the oracles of the engines."""

    def __init__(self, machine: FleetMachine) -> None:
        super().__init__(depth=1, batch_requests=1, batch_tokens=1)
        self._machine = machine

    @property
    def is_settled(self) -> bool:
        return all(engine.run.oracle.is_settled and not engine.serving for engine in self._machine.living)

    @property
    def names(self) -> Iterable[str]:
        """The rids of all requests of all engines."""
        return [rid for engine in self._machine.engines for rid in engine.run.oracle.names]

    def is_live(self, rid: str) -> bool:
        return any(engine.run.oracle.is_live(rid) for engine in self._machine.living)

    def after_step(self, events: Any, stepped: Any, machine: FleetMachine, device: Any) -> None:
        """Each engine was judged in its step."""

    def at_rest(self, machine: FleetMachine) -> None:
        """Every request has ended, and the caches are still there. Raises Violation."""
        for engine in machine.living:
            engine.run.oracle.at_rest(engine.run.machine)

    def at_end(self, machine: FleetMachine) -> None:
        """Every engine is idle and flushed, and what each client was told is what it is told alone."""
        for engine in machine.living:
            engine.run.oracle.at_end(engine.run.machine)
