"""The machines of a fleet as one machine of the search; each is judged by the oracle of its adapter in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from scripted.core.clock import VirtualClock
from scripted.core.named import adapter_named
from scripted.core.run import EMPTY_STEPS_LIMIT
from scripted.fleets.config import FleetConfig
from scripted.fleets.run import MemberRun
from scripted.script.fleet import BaseFleet, Member

# Fewer than a run allows: machines that go round in circles, for instance because each needs what is on a link that is
# held, count as standing still, so that what keeps them is undone.
SILENT_STEPS_LIMIT: Final = EMPTY_STEPS_LIMIT // 2


class FleetOutput(msgspec.Struct, frozen=True):
    """The output of one step of all machines, which answer for their own microbatches."""

    replies: tuple[Any, ...]
    again: bool
    deadline: float | None
    microbatch: None = None


class SearchedMember(Member):
    """One machine of a fleet with the run that it is in."""

    run: MemberRun

    @property
    def is_busy(self) -> bool:
        """Its next step has something to do, without help."""
        return self.run.is_busy

    @property
    def is_quiet(self) -> bool:
        """It has nothing more to do, for its own clients or for other machines."""
        return bool(self.run.machine.is_idle and self.run.is_settled and not self.run.arrived)

    def check_quiet(self) -> None:
        """Nothing is on its way: what it knows of the others must be right. Raises Violation."""


class FleetMachine:
    """All machines, frozen between two steps. ``of`` is the adapter of fleets that makes them."""

    depth = 1

    def __init__(self, of: str, config: FleetConfig, *, record: bool) -> None:
        self._of = of
        self._config = config
        self._record = record
        # Steps in a row in which no client was told anything, and no machine either.
        self._silent = 0
        # How many machines were made.
        self.made = 0
        self.clock = VirtualClock()
        self.fleet: BaseFleet[SearchedMember] = BaseFleet([self._new(name) for name in config.names])

    @property
    def living(self) -> list[SearchedMember]:
        """Those that were not killed."""
        return self.fleet.living

    def engine(self, name: str) -> SearchedMember:
        """The machine of this name."""
        return self.fleet.engine(name)

    def restart(self, name: str) -> None:
        """A dead machine comes back as a new one."""
        self.fleet.replace(self._new(name))

    def _new(self, name: str) -> SearchedMember:
        adapter: Any = adapter_named(self._of)
        self.made += 1
        member: SearchedMember = adapter.new_member(self, self._config, name, record=self._record)
        return member

    def step(self, events: Sequence[tuple[str, Any]], now: float) -> FleetOutput:
        """One step of each machine; the events are the last ones of every run. Raises Violation."""
        self.clock.advance(now - self.clock.now())
        for name, event in events:
            self.engine(name).run.give(event)
        self.fleet.step()
        self._let_go()
        stepped = [one.run.previous for one in self.living if one.run.stepped]
        last = [one.run.previous for one in self.living if one.run.previous is not None]
        deadlines = [one.deadline for one in last if one.deadline is not None]
        replies = tuple(reply for one in stepped for reply in one.replies)
        self._silent = 0 if replies or self.fleet.has_heard else self._silent + 1
        return FleetOutput(replies, self.is_moving, min(deadlines, default=None))

    def stir(self) -> None:
        """Something happens to them that is no step."""
        self._silent = 0

    @property
    def is_moving(self) -> bool:
        """The next step has something to do, without help."""
        is_busy = self._silent < SILENT_STEPS_LIMIT and any(one.is_busy for one in self.living)
        return self.fleet.is_moving or is_busy

    def _let_go(self) -> None:
        """Those that drain and have nothing left are gone, as if they had died: nothing may be open there."""
        for one in self.living:
            if one.is_draining and one.is_quiet and not self.fleet.carries(one.name):
                one.run.oracle.at_rest(one.run.machine)
                self.fleet.kill(one.name)

    @property
    def is_idle(self) -> bool:
        return all(one.run.machine.is_idle and not one.run.arrived for one in self.living)

    def counts(self) -> Mapping[str, int]:
        """What the machines say of themselves, by name."""
        return {f"{one.name}_{name}": n for one in self.living for name, n in one.run.machine.counts().items()}


class NoDevice:
    """Each machine has its own."""

    def launch(self, microbatch: Any) -> None:
        """Nothing is launched here."""

    def next_completion(self, timeout_s: float | None) -> Any:
        """None: results are those of the machines."""
        del timeout_s
