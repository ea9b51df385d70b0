"""An engine of a fleet under the search: its run, and what it says to the others."""

from __future__ import annotations

from typing import Any

from engine.limits import Limits
from scripted.adapters.lockstep.script.fleet_ends import EngineEnd
from scripted.adapters.lockstep.simulated.transfers import SimulatedTransfers
from scripted.fleets.machine import SearchedMember
from scripted.fleets.run import MemberRun


class SearchedEngine(EngineEnd, SearchedMember):
    """One engine of a fleet; all that it sends and receives is real to the others."""

    def __init__(self, name: str, run: MemberRun) -> None:
        super().__init__(name)
        self.run = run
        self.transfers.is_imagined = False

    @property
    def arrived(self) -> list[Any]:
        return self.run.arrived

    @property
    def transfers(self) -> SimulatedTransfers:
        return self.run.device.transfers  # type: ignore[no-any-return]

    @property
    def limits(self) -> Limits:
        return self.run.machine.limits  # type: ignore[no-any-return]

    def step(self) -> None:
        if self.run.advance():
            self.tell(self.run.previous.replies)
