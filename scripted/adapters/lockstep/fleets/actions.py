"""What may happen to a fleet: to one of its engines what happens to an engine, and what links and engines have."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import ClassVar, Final

import msgspec

from scripted.adapters.lockstep.actions import (
    FailGrammar,
    FailTransfer,
    HoldGrammars,
    HoldTransfers,
    KillStage,
    LoraLoad,
    LoraUnload,
    ReleaseGrammars,
    ReleaseTransfers,
    all_actions,
)
from scripted.adapters.lockstep.configs import limits_of
from scripted.adapters.lockstep.script.fleet import role_of
from scripted.core.action import Action, RunLike, SearchBase
from scripted.core.common_actions import AdvanceClock
from scripted.core.placed import Placed, parse_placed

NAME: Final = "lockstep-fleet"
# What an engine of a fleet does not have, or a fleet does in its own way.
_NOT_HERE: Final = (
    FailGrammar, FailTransfer, HoldGrammars, HoldTransfers, KillStage, LoraLoad, LoraUnload, ReleaseGrammars,
    ReleaseTransfers, AdvanceClock,
)  # fmt: skip
INNER: Final = tuple(kind for kind in all_actions() if kind not in _NOT_HERE)


@functools.lru_cache(maxsize=4096)
def _read(clause: str) -> Action:
    return parse_placed(f"1 {clause}", INNER).action


def clause_of(action: Action) -> str:
    """What ``do`` says of it."""
    return str(Placed(1, action)).partition(" ")[2]


# -- what happens to one engine --


class _At(Action, frozen=True, kw_only=True, omit_defaults=True):
    """What a schedule of one engine can do, done to this one: ``do`` is its clause, without a step."""

    on: str
    do: str

    @property
    def inner(self) -> Action:
        """The action of one engine. Raises ScriptDefinitionError."""
        return _read(self.do)

    @property
    def kind(self) -> str:
        return f"{self.on[0]} {self.inner.kind}"

    def apply(self, run: RunLike) -> None:
        """As in a run of that engine; nothing where it is dead."""
        engine = run.machine.engine(self.on)
        if not engine.is_dead:
            self.inner.apply(engine.run)

    def reaches(self, run: RunLike) -> bool:
        engine = run.machine.engine(self.on)
        return not engine.is_dead and self.inner.reaches(engine.run)

    def smaller(self) -> Iterator[Action]:
        """What is smaller of one engine."""
        for smaller in self.inner.smaller():
            yield msgspec.structs.replace(self, do=clause_of(smaller))


class Begin(_At, frozen=True, kw_only=True, omit_defaults=True, tag="begin"):
    """A client sends a request to this engine: ``do`` is the clause of ``start``."""

    examples: ClassVar = ('begin on=d0 do="start a prompt=30 new=2"',)
    is_start: ClassVar[bool] = True

    @property
    def time_limits(self) -> tuple[float, ...]:
        """The seconds after which it ends by itself."""
        return getattr(self.inner, "time_limits", ())


class At(_At, frozen=True, kw_only=True, omit_defaults=True, tag="at"):
    """Something else happens to this engine."""

    examples: ClassVar = ('at on=d0 do="abort a"', "at on=p0 do=flush")

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """What can be added to a schedule of one engine, at each engine."""
        for name in base.config.names:
            starts = tuple([one.inner for one in base.starts if isinstance(one, Begin) and one.on == name])
            config = base.config.engine.model_copy(update={"role": role_of(name)})
            own = SearchBase(config, limits_of(config), starts, frozenset(map(type, starts)))
            for kind in INNER:
                if not kind.is_fatal:
                    yield from (cls(on=name, do=clause_of(one)) for one in kind.extras(own) if not one.is_start)


# -- what happens to links and engines --


class _OnLink(Action, frozen=True, kw_only=True, omit_defaults=True):
    """Something happens to the link from one engine to another."""

    sender: str
    receiver: str

    is_control: ClassVar[bool] = True

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """At every link between a prefill and a decode engine."""
        names = base.config.names
        return [cls(sender=one, receiver=two) for one in names for two in names if {one[0], two[0]} == {"p", "d"}]

    def smaller(self) -> Iterator[Action]:
        """None is smaller."""
        return iter(())


class HoldTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="hold-link"):
    """Nothing that one engine says reaches the other; with ``pages`` no KV does."""

    pages: bool = False

    examples: ClassVar = ("hold-link sender=d0 receiver=p0", "hold-link sender=p0 receiver=d0 pages=True")

    def apply(self, run: RunLike) -> None:
        fleet = run.machine.fleet
        (fleet.hold_pages if self.pages else fleet.hold)(self.sender, self.receiver)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """All of it, and pages alone."""
        links = list(super().extras(base))
        pages = [one for one in links if isinstance(one, HoldTraffic) and one.sender[0] == "p"]
        return [*links, *[msgspec.structs.replace(one, pages=True) for one in pages]]


class ReleaseTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="release-link"):
    """What is held goes on."""

    examples: ClassVar = ("release-link sender=d0 receiver=p0",)

    def apply(self, run: RunLike) -> None:
        run.machine.fleet.release(self.sender, self.receiver)


class SlowTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="slow-link"):
    """What one engine says takes so many steps longer from now on."""

    steps: int = 3

    examples: ClassVar = ("slow-link sender=p0 receiver=d0", "slow-link sender=p0 receiver=d0 steps=7")

    def apply(self, run: RunLike) -> None:
        run.machine.fleet.slow(self.sender, self.receiver, self.steps)


class CutTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="cut-link"):
    """Both ways are cut: what is on them is lost, and both engines learn that the connection broke."""

    examples: ClassVar = ("cut-link sender=p0 receiver=d0",)

    def apply(self, run: RunLike) -> None:
        run.machine.fleet.cut(self.sender, self.receiver)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Once for both ways."""
        return [one for one in super().extras(base) if isinstance(one, CutTraffic) and one.sender[0] == "p"]


class HealTraffic(_OnLink, frozen=True, kw_only=True, omit_defaults=True, tag="heal-link"):
    """Both ways are there again."""

    examples: ClassVar = ("heal-link sender=p0 receiver=d0",)

    def apply(self, run: RunLike) -> None:
        run.machine.fleet.heal(self.sender, self.receiver)

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """None: what is cut stays so, unless a workload heals it."""
        del base
        return ()


class KillEngine(Action, frozen=True, kw_only=True, omit_defaults=True, tag="kill-engine"):
    """An engine dies with all that it holds; with ``comes_back`` it is a new one in the same step."""

    on: str
    comes_back: bool = False

    examples: ClassVar = ("kill-engine on=p0", "kill-engine on=p0 comes_back=True")
    is_control: ClassVar[bool] = True

    def apply(self, run: RunLike) -> None:
        machine = run.machine
        if not machine.engine(self.on).is_dead:
            machine.fleet.kill(self.on)
            if self.comes_back:
                machine.restart(self.on)

    def reaches(self, run: RunLike) -> bool:
        return not run.machine.engine(self.on).is_dead

    @classmethod
    def extras(cls, base: SearchBase) -> Iterable[Action]:
        """Each engine, for good and not."""
        return [cls(on=name, comes_back=comes_back) for name in base.config.names for comes_back in (False, True)]


FLEET_ACTIONS: Final[tuple[type[Action], ...]] = (
    Begin, At, HoldTraffic, ReleaseTraffic, SlowTraffic, CutTraffic, HealTraffic, KillEngine, AdvanceClock,
)  # fmt: skip
