"""The adapter ``lockstep-fleet``: several engines with roles, their links and one clock, as one machine of the search.

A schedule of it does to each engine what a schedule of one engine does (``at d0 do="abort a"``), and to links and
engines what only a fleet has. Each engine is judged by the oracle of an engine, in every step and at the end.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar, Final

import msgspec

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.limits import Limits
from engine.messages import FlushCache, GetStats
from scripted.adapters.lockstep.actions import (
    FailGrammar,
    FailTransfer,
    HoldGrammars,
    HoldTransfers,
    KillStage,
    LoraLoad,
    LoraUnload,
    ReleaseGrammars,
    ReleaseResults,
    ReleaseTransfers,
    Relieve,
    ResumeServing,
    ResumeStage,
    StartRequest,
    Update,
    WakeServing,
    all_actions,
)
from scripted.adapters.lockstep.adapter import LockstepAdapter
from scripted.adapters.lockstep.configs import config_values, limits_of, smaller_configs
from scripted.adapters.lockstep.engine_oracle import EngineOracle
from scripted.adapters.lockstep.places import place_of, relations_of
from scripted.adapters.lockstep.roles import DECODE
from scripted.adapters.lockstep.script.fleet import Fleet, FleetEngine, role_of
from scripted.adapters.lockstep.script.reset import HARNESS_CALL
from scripted.adapters.lockstep.sim.runner import new_fleet
from scripted.core.action import Action, RunLike, SearchBase
from scripted.core.clock import VirtualClock
from scripted.core.common_actions import AdvanceClock
from scripted.core.oracle import Oracle
from scripted.core.placed import Placed, parse_placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.core.written import WrittenTest
from scripted.report.step_log import Said, ShownBatch, ShownStep, StepLog
from scripted.search.generated import EVENT, Row, drawn_events

NAME: Final = "lockstep-fleet"
# What an engine of a fleet does not have, or a fleet does in its own way.
_NOT_HERE: Final = (
    FailGrammar, FailTransfer, HoldGrammars, HoldTransfers, KillStage, LoraLoad, LoraUnload, ReleaseGrammars,
    ReleaseTransfers, AdvanceClock,
)  # fmt: skip
_INNER: Final = tuple(kind for kind in all_actions() if kind not in _NOT_HERE)
_FLEETS: Final = ("p0,d0", "p0,d0", "p0,p1,d0", "p0,d0,d1", "p0,p1,d0,d1")


class FleetConfig(msgspec.Struct, frozen=True):
    """Engines of these names, all of one configuration but for their roles."""

    engine: EngineConfig
    names: tuple[str, ...]


@functools.lru_cache(maxsize=4096)
def _read(clause: str) -> Action:
    return parse_placed(f"1 {clause}", _INNER).action


def _clause(action: Action) -> str:
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
            yield msgspec.structs.replace(self, do=_clause(smaller))


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
            for kind in _INNER:
                if not kind.is_fatal:
                    yield from (cls(on=name, do=_clause(one)) for one in kind.extras(own) if not one.is_start)


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


# -- a run --


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


class FleetSpace:
    """Implements ``scripted.search.generated.Space``: a decode engine's targets, spread over a fleet."""

    @functools.cached_property
    def features(self) -> dict[str, tuple[str, ...]]:
        features = DECODE.space.features.items()
        own = {name: levels for name, levels in features if not name.startswith(EVENT) and name not in _LEFT_OUT}
        events = dict.fromkeys((EVENT + kind for kind in ("at", *_LINK_KINDS)), ("on",))
        return {"engines": ("more",), **own, **events}

    @property
    def triples(self) -> tuple[str, ...]:
        """Those of one engine that are left."""
        return tuple(name for name in DECODE.space.triples if name in self.features)

    def allows(self, row: Row) -> bool:
        return DECODE.space.allows(_of_one(row))

    def draw(self, row: Row, rng: random.Random) -> Schedule:
        """Raises what the space of one engine raises."""
        base = DECODE.space.draw(_of_one(row), rng)
        names = tuple(rng.choice(_FLEETS[2:] if "engines" in row else _FLEETS).split(","))
        decoding = [name for name in names if name[0] == "d"]
        placed = []
        for one in base.placed:
            if isinstance(one.action, StartRequest):
                placed.append(Placed(one.step, Begin(on=rng.choice(decoding), do=_clause(one.action))))
            elif isinstance(one.action, AdvanceClock):
                placed.append(one)
            elif type(one.action) in _INNER:
                placed.append(Placed(one.step, At(on=rng.choice(names), do=_clause(one.action))))
        config = FleetConfig(base.config.model_copy(update={"role": "both"}), names)
        schedule = Schedule(config, tuple(placed), NAME)
        events = {name: "on" for name in row if name.startswith(EVENT)}
        return schedule.with_placed(list(drawn_events(events, rng, schedule)))


_LINK_KINDS: Final = ("hold-link", "slow-link", "cut-link", "kill-engine")
_LEFT_OUT: Final = {"loras", "kept-grammars", "held-grammars", "profile", "scale"}


def _of_one(row: Row) -> Row:
    return {name: level for name, level in row.items() if name != "engines" and not name.startswith(EVENT)}


_SMALL: Final = "engines=p0,d0 page_size=4 chunked_prefill_size=16 max_total_tokens=128"
_PAIR: Final = "engines=p0,p1,d0,d1 page_size=4 chunked_prefill_size=16 max_total_tokens=128"


class FleetAdapter(LockstepAdapter):
    """Implements the adapter protocol over several engines. Runs of it are not copied."""

    name = NAME
    actions = FLEET_ACTIONS
    resuming = None
    undoing = ()
    space: Any = FleetSpace()
    workloads: Mapping[str, str] = {
        "one": f'{_SMALL}; 1 begin on=d0 do="start a prompt=50 new=3"',
        "again": f'{_SMALL}; 1 begin on=d0 do="start a prompt=50"; 14 begin on=d0 do="start b prompt=60 new=3"',
        "several": f'{_SMALL}; 1 begin on=d0 do="start a prompt=50 new=3"; 2 begin on=d0 do="start b prompt=30 seed=1"'
        '; 3 begin on=d0 do="start c prompt=41 new=4"',
        "pair": f'{_PAIR}; 1 begin on=d0 do="start a prompt=50 new=3"; 1 begin on=d1 do="start b prompt=40 new=3"'
        '; 3 begin on=d0 do="start c prompt=33 seed=2"; 4 begin on=d1 do="start e prompt=50"',
    }

    # -- configurations --

    def read_config(self, words: Mapping[str, str]) -> Any:
        """``engines=p0,d0`` and the settings of one engine. Raises ConfigError, BadCall."""
        values = dict(words)
        names = tuple(values.pop("engines", "p0,d0").split(","))
        for name in names:
            role_of(name)
        return FleetConfig(EngineConfig(**values), names)

    def config_words(self, config: Any) -> Mapping[str, Any]:
        return {"engines": ",".join(config.names), **config_values(config.engine)}

    def smaller_configs(self, config: Any) -> Iterator[Any]:
        """With one setting less."""
        for engine in smaller_configs(config.engine):
            with suppress(ConfigError):
                for name in config.names:
                    engine.model_copy(update={"role": role_of(name)})
                yield FleetConfig(engine, config.names)

    def limits_of(self, config: Any) -> Limits:
        return limits_of(config.engine.model_copy(update={"role": "decode"}))

    # -- a run --

    def new_parts(self, config: Any, *, record: bool) -> tuple[Any, Any, Any]:
        del record
        machine = FleetMachine(config)
        return machine, NoDevice(), FleetOracle(machine)

    def new_step(self, events: tuple[Any, ...], now: float) -> Any:
        return _FleetStep(events, now)

    def drive(self, run: Run) -> None:
        """One step of all engines at a time."""
        result = None
        with run:
            while (step := run.next_step(result)) is not None:
                result = run.machine.step(step.events, step.now)

    def leave_out(self, run: Run) -> None:
        """The comparison of each engine with the specification."""
        for engine in run.machine.engines:
            engine.run.oracle.conformance = None

    def what_is_busy(self, run: Run) -> str:
        return "; ".join(f"{one.name}: {one.run.scheduler.books.what_is_busy()}" for one in run.machine.living)

    def where(self, run: Run, rid: str | None) -> tuple[str, str]:
        """The states of all engines."""
        places = [(one.name[0], *place_of(one.run.scheduler, rid)) for one in run.machine.living]
        return "; ".join(sorted({f"{role}: {place}" for role, place, _ in places})), str(len(places))

    def relations(self, run: Run) -> Hashable:
        return tuple(relations_of(one.run.scheduler) for one in run.machine.living)

    def obstacle(self, run: Run) -> Action | None:
        """A link that is held, or what keeps one engine from going on."""
        held = run.machine.fleet.held_links
        if held:
            return ReleaseTraffic(sender=held[0][0], receiver=held[0][1])
        for engine in run.machine.living:
            action = _what_keeps(engine)
            if action is not None:
                return At(on=engine.name, do=_clause(action))
        return None

    def also_due(self, run: Run) -> Sequence[Any]:
        """Nothing: engines take their own results."""
        del run
        return ()

    def finale(self, run: Run, turn: int) -> Sequence[Any]:
        """A flush of every engine, and the question for its counters."""
        del run
        return () if turn else ("end",)

    def record_step(self, step: Any, stepped: Any | None, machine: Any, error: str | None) -> Any:
        """The last record of each engine."""
        del step, stepped
        last = {one.name: one.run.records[-1] for one in machine.engines if one.run.records}
        logs = {name: log.steps[-1] for name, log in machine.fleet.logs(1) if log.steps}
        return _FleetRecord(last, logs, error)

    def as_log(self, records: Sequence[Any], config: Any) -> StepLog:
        """All engines in one table: each word names its engine."""
        del config
        return StepLog(1, 1, tuple([_merged(number, one) for number, one in enumerate(records, 1)]))

    def check_records(self, records: Sequence[Any]) -> None:
        """Nothing more."""

    def freeze(self, run: Run) -> Any:
        """None: every run is done from its beginning."""
        del run

    def digests(self, run: Run) -> Iterator[bytes | None]:
        """The engines' own digests, with what is on the links."""
        for engine in run.machine.engines:
            yield engine.run.scheduler.digests.digest.encode()
        yield repr(run.machine.fleet.traffic).encode()

    def plan_of(self, record: Any) -> object:
        """What each engine launched."""
        plans = {name: one.microbatch for name, one in record.last.items()}
        return {name: plan for name, plan in plans.items() if plan is not None} or None

    @property
    def mutant_names(self) -> tuple[str, ...]:
        """None: the bugs of one engine are searched in one engine."""
        return ()

    def settling(self, placed: Sequence[Placed], outcome: Any) -> list[Placed]:
        """What ended a run."""
        del placed
        return list(outcome.implied)

    def standalone_test(self, schedules: Sequence[Any], *, name: str) -> WrittenTest:
        """There is none. Raises ScriptDefinitionError."""
        del schedules, name
        raise ScriptDefinitionError(
            "`scripted replay` does a fleet's schedule again; write its test with t.engines(...)"
        )


class _FleetStep(msgspec.Struct, frozen=True):
    events: tuple[Any, ...]
    now: float


class _FleetRecord(msgspec.Struct, frozen=True):
    last: dict[str, Any]
    shown: dict[str, ShownStep]
    error: str | None


def _what_keeps(engine: FleetEngine) -> Action | None:
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


def _merged(number: int, record: _FleetRecord) -> ShownStep:
    """One step of all engines as one row."""
    arrived, answered, launched = [], [], []
    for name, step in record.shown.items():
        arrived += [Said(text=f"{name}: {said.in_full}", kind=said.kind) for said in step.arrived]
        answered += [Said(text=f"{name}: {said.in_full}", kind=said.kind) for said in step.answered]
        launched += [] if step.launched is None else [f"{name}: {step.launched.in_full}"]
    batch = ShownBatch(id=number, kind="steps", order="; ".join(launched)) if launched else None
    now = max([step.now for step in record.shown.values()], default=0.0)
    return ShownStep(
        step=number, now=now, arrived=tuple(arrived), launched=batch, answered=tuple(answered), error=record.error
    )


ADAPTER: Final = FleetAdapter()
