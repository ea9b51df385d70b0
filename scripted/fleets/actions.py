"""The actions on a fleet: any action of one machine, and actions on links and whole machines."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Iterator
from typing import ClassVar

import msgspec

from scripted.core.action import Action, Culprit, RunLike, SearchBase
from scripted.core.placed_action import Placed, parse_action
from scripted.fleets.machine import FleetConfig, fleet_adapter


@functools.lru_cache(maxsize=4096)
def _read(of: str, clause: str) -> Action:
    return parse_action(clause, fleet_adapter(of).inner_actions)


def clause_of(action: Action) -> str:
    """Return the clause of an action without its step: the text of ``do``."""
    return str(Placed(1, action)).partition(" ")[2]


class _OnFleet(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Base of all actions on a fleet; each may end a loop that machines are stuck in."""

    caused_by: ClassVar[Culprit] = Culprit.HARDWARE

    def apply(self, run: RunLike) -> None:
        run.machine.stir()
        self.act(run)

    @abstractmethod
    def act(self, run: RunLike) -> None:
        """Apply the action to the fleet."""


# -- actions on one machine --


class OnEngine(_OnFleet, frozen=True, kw_only=True, omit_defaults=True):
    """Applies an action of one machine to the machine ``on``; ``do`` is its clause without a step."""

    on: str
    do: str

    of: ClassVar[str]

    @property
    def inner(self) -> Action:
        """The action of one machine. Raises ScriptDefinitionError."""
        return _read(self.of, self.do)

    @property
    def culprit(self) -> Culprit:
        return self.inner.culprit

    @property
    def kind(self) -> str:
        return f"{self.on[0]} {self.inner.kind}"

    @property
    def time_limits(self) -> tuple[float, ...]:
        return self.inner.time_limits

    def act(self, run: RunLike) -> None:
        """Act as in a run of that machine; do nothing if it is dead, or drains and the action begins something."""
        engine = run.machine.engine(self.on)
        if not (engine.is_dead or (engine.is_draining and self.inner.is_start)):
            # A conversation may continue on another machine.
            engine.run.beside = [one.run for one in run.machine.living if one is not engine]
            self.inner.apply(engine.run)
            engine.run.beside = ()

    def reaches(self, run: RunLike) -> bool:
        engine = run.machine.engine(self.on)
        return not engine.is_dead and self.inner.reaches(engine.run)

    def smaller(self) -> Iterator[Action]:
        """Yield this action with each smaller action of its machine."""
        for smaller in self.inner.smaller():
            yield msgspec.structs.replace(self, do=clause_of(smaller))

    @classmethod
    def inner_base(cls, base: SearchBase, name: str) -> SearchBase:
        """Return the part of a base schedule that belongs to one machine."""
        adapter, config = fleet_adapter(cls.of), base.config
        starts = tuple([one.inner for one in base.starts if isinstance(one, OnEngine) and one.on == name])
        own = adapter.config_of(config, name)
        return SearchBase(own, adapter.inner.limits_of(own), starts, frozenset(map(type, starts)))


def actions_on_engines(of: str) -> tuple[type[OnEngine], type[OnEngine]]:
    """Return the actions for fleets of this adapter: one begins a request, the other does anything else."""

    class Begin(OnEngine, frozen=True, kw_only=True, omit_defaults=True, tag="begin"):
        """A client sends a request to this machine: ``do`` is the clause of ``start``."""

        examples: ClassVar = ('begin on=d0 do="start a prompt=30 new=2"',)
        is_start: ClassVar[bool] = True

    class At(OnEngine, frozen=True, kw_only=True, omit_defaults=True, tag="at"):
        """Any other action on this machine."""

        examples: ClassVar = ('at on=d0 do="abort a"', "at on=p0 do=flush")

        @classmethod
        def extras(cls, base: SearchBase) -> Iterable[Action]:
            """Yield the extras of one machine for each machine."""
            for name in base.config.names:
                own = cls.inner_base(base, name)
                for kind in fleet_adapter(of).inner_actions:
                    if not kind.is_fatal:
                        yield from (cls(on=name, do=clause_of(one)) for one in kind.extras(own) if not one.is_start)

    Begin.of = At.of = of
    return Begin, At


# -- actions on links and machines --


class _OnLink(_OnFleet, frozen=True, kw_only=True, omit_defaults=True):
    """An action on the link from one machine to another."""

    sender: str
    receiver: str

    is_control: ClassVar[bool] = True

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield the action for every link between a prefill and a decode engine."""
        names = base.config.names
        return [cls(sender=one, receiver=two) for one in names for two in names if {one[0], two[0]} == {"p", "d"}]

    def smaller(self) -> Iterator[Action]:
        return iter(())


class HoldTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="hold-link"):
    """Holds all messages on a link; with ``pages`` only the KV."""

    pages: bool = False

    examples: ClassVar = ("hold-link sender=d0 receiver=p0", "hold-link sender=p0 receiver=d0 pages=True")

    def act(self, run: RunLike) -> None:
        fleet = run.machine.fleet
        (fleet.hold_pages if self.pages else fleet.hold)(self.sender, self.receiver)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield holds of all messages, and of pages alone."""
        links = list(super().extras(base))
        pages = [one for one in links if isinstance(one, HoldTraffic) and one.sender[0] == "p"]
        return [*links, *[msgspec.structs.replace(one, pages=True) for one in pages]]


class ReleaseTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="release-link"):
    """Releases the messages that a link holds."""

    examples: ClassVar = ("release-link sender=d0 receiver=p0",)

    def act(self, run: RunLike) -> None:
        run.machine.fleet.release(self.sender, self.receiver)


class SlowTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="slow-link"):
    """Delays all later messages on a link by this many steps."""

    steps: int = 3

    examples: ClassVar = ("slow-link sender=p0 receiver=d0", "slow-link sender=p0 receiver=d0 steps=7")

    def act(self, run: RunLike) -> None:
        run.machine.fleet.slow(self.sender, self.receiver, self.steps)


class CutTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="cut-link"):
    """Cuts both directions: messages in transit are lost, and both machines learn that the connection broke."""

    examples: ClassVar = ("cut-link sender=p0 receiver=d0",)

    def act(self, run: RunLike) -> None:
        run.machine.fleet.cut(self.sender, self.receiver)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield each pair once, since a cut affects both directions."""
        return [one for one in super().extras(base) if isinstance(one, CutTraffic) and one.sender[0] == "p"]


class HealTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="heal-link"):
    """Restores both directions."""

    examples: ClassVar = ("heal-link sender=p0 receiver=d0",)

    def act(self, run: RunLike) -> None:
        run.machine.fleet.heal(self.sender, self.receiver)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield nothing: a cut lasts unless a workload heals it."""
        del base
        return ()


class _OnMember(_OnFleet, frozen=True, kw_only=True, omit_defaults=True):
    """An action on a whole machine."""

    on: str

    is_control: ClassVar[bool] = True

    def reaches(self, run: RunLike) -> bool:
        return not run.machine.engine(self.on).is_dead

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        return [cls(on=name) for name in base.config.names]


class KillEngine(_OnMember, frozen=True, kw_only=True, omit_defaults=True, tag="kill-engine"):
    """Kills a machine with everything it holds; with ``comes_back`` a new one replaces it in the same step."""

    comes_back: bool = False

    examples: ClassVar = ("kill-engine on=p0", "kill-engine on=p0 comes_back=True")

    def act(self, run: RunLike) -> None:
        machine = run.machine
        if not machine.engine(self.on).is_dead:
            machine.fleet.kill(self.on)
            if self.comes_back:
                machine.restart(self.on)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Yield each machine's death, with and without a replacement."""
        config: FleetConfig = base.config
        return [cls(on=name, comes_back=comes_back) for name in config.names for comes_back in (False, True)]


class DrainEngine(_OnMember, frozen=True, kw_only=True, omit_defaults=True, tag="drain-engine"):
    """Drains a machine: it takes nothing new, and leaves once it is done."""

    examples: ClassVar = ("drain-engine on=p0",)
    caused_by: ClassVar[Culprit] = Culprit.OPERATOR

    def act(self, run: RunLike) -> None:
        run.machine.engine(self.on).is_draining = True

    def reaches(self, run: RunLike) -> bool:
        return super().reaches(run) and not run.machine.engine(self.on).is_draining


class JoinEngine(_OnMember, frozen=True, kw_only=True, omit_defaults=True, tag="join-engine"):
    """Brings back a machine that has left or died, as a new one."""

    examples: ClassVar = ("join-engine on=p0",)
    caused_by: ClassVar[Culprit] = Culprit.OPERATOR

    def act(self, run: RunLike) -> None:
        if self.reaches(run):
            run.machine.restart(self.on)

    def reaches(self, run: RunLike) -> bool:
        return not super().reaches(run)


TRAFFIC_ACTIONS: tuple[type[Action], ...] = (
    HoldTraffic, ReleaseTraffic, SlowTraffic, CutTraffic, HealTraffic, KillEngine, DrainEngine, JoinEngine,
)  # fmt: skip
