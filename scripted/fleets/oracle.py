"""The oracle of a fleet: it asks those of its machines, and what is open anywhere goes on, or something keeps it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from scripted.core.account import Account, Life
from scripted.core.oracle import Oracle
from scripted.core.violation import Violation
from scripted.fleets.machine import FleetMachine


class _Requests(Account):
    """The requests of all machines that live, each with the name of its own before its rid."""

    def __init__(self, machine: FleetMachine) -> None:
        self._machine = machine
        self.step = 0
        self.moved = False

    @property
    def live(self) -> dict[str, Life]:  # type: ignore[override]
        members = self._machine.living
        return {f"{one.name}:{rid}": life for one in members for rid, life in one.run.oracle.account.live.items()}

    @property
    def lives(self) -> list[Life]:  # type: ignore[override]
        return [life for one in self._machine.living for life in one.run.oracle.account.lives]


class FleetOracle(Oracle):
    """Each machine was judged in its step; here the end is, and what stands still."""

    def __init__(self, machine: FleetMachine) -> None:
        super().__init__(depth=1, batch_requests=1, batch_tokens=1)
        self._machine = machine
        self.account = _Requests(machine)

    @property
    def is_settled(self) -> bool:
        return all(one.run.is_settled for one in self._machine.living)

    @property
    def could_go_on(self) -> Iterable[Life]:
        # What happened since the last step, such as a death, may have moved them.
        members = () if self._machine.is_moving else self._machine.living
        return [life for one in members for life in one.run.oracle.could_go_on]

    @property
    def names(self) -> Iterable[str]:
        """The rids of all requests of all machines."""
        return [rid for one in self._machine.living for rid in one.run.oracle.names]

    def is_live(self, rid: str) -> bool:
        return any(one.run.is_live(rid) for one in self._machine.living)

    def after_step(self, events: Any, stepped: Any, machine: FleetMachine, device: Any) -> None:
        """Each machine was judged in its step."""

    def at_rest(self, machine: FleetMachine) -> None:
        """Every request has ended, and the caches are still there. Raises Violation."""
        self._ask(machine, lambda one: one.run.oracle.at_rest(one.run.machine))
        self._ask(machine, lambda one: one.check_quiet())

    def at_end(self, machine: FleetMachine) -> None:
        """Every machine is idle and flushed, and what each client was told is what it is told alone."""
        self._ask(machine, lambda one: one.run.oracle.at_end(one.run.machine))

    def _ask(self, machine: FleetMachine, question: Any) -> None:
        for one in machine.living:
            try:
                question(one)
            except Violation as exc:
                raise Violation(f"engine {one.name}: {exc}") from exc
