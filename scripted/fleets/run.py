"""The run of one machine of a fleet: what it is given comes from the fleet, and nothing is settled here."""

from __future__ import annotations

from typing import Any

from scripted.core.action import Action
from scripted.core.clock import VirtualClock
from scripted.core.common_actions import ReleaseResults
from scripted.core.run import Phase, Run
from scripted.core.schedule import Schedule


class MemberRun(Run):
    """A run that takes one step at a time, and none where a server of its kind would go on waiting."""

    def __init__(self, config: Any, of: str, clock: VirtualClock, *, record: bool) -> None:
        super().__init__(Schedule(config, (), of), record=record)
        self.clock = clock
        # Whether the last step of the fleet was one of this machine too.
        self.stepped = False
        self._interventions: list[Any] = []

    def give(self, event: Any) -> None:
        self.arrived.append(event)

    def happened(self, event: Any) -> None:
        self._interventions.append(event)

    def advance(self) -> bool:
        """One step, if an event, the last step or a deadline asks for one. Raises Violation."""
        self.begin_composing()
        self.step += 1
        self._events, self._interventions = self._interventions, []
        self._take_due()
        self._events += self.adapter.also_due(self)
        self._events += self.arrived
        self.arrived.clear()
        self.stepped = bool(self._events) or self._is_due
        if self.stepped:
            self.phase = Phase.ADAPTER
            step = self.adapter.new_step(tuple(self._events), self.clock.now())
            adapter: Any = self.adapter
            try:
                self._previous = adapter.take_step(self, step)
            except Exception as exc:
                self.__exit__(type(exc), exc, exc.__traceback__)
                raise
            self._judge(self._previous)
            self.phase = Phase.HARNESS
        return self.stepped

    @property
    def _is_due(self) -> bool:
        previous = self._previous
        if previous is None:
            return False
        return previous.again or (previous.deadline is not None and previous.deadline <= self.clock.now())

    @property
    def is_busy(self) -> bool:
        """Its next step has something to do, without help."""
        waits = len(self.results) and not self._holding and not self.results.stalled
        return bool(self.stepped or self.arrived or waits)

    @property
    def obstacle(self) -> Action | None:
        """What undoes the next thing that keeps it from going on; None when nothing does."""
        return ReleaseResults() if self._holding else super().obstacle
