"""The adapter ``lockstep-fleet``: several engines with roles, their links and one clock, as one machine of the search.

A schedule of it does to each engine what a schedule of one engine does (``at d0 do="abort a"``), and to links and
engines what only a fleet has.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.limits import Limits
from scripted.adapters.lockstep.adapter import LockstepAdapter
from scripted.adapters.lockstep.configs import config_values, limits_of, smaller_configs
from scripted.adapters.lockstep.fleets.actions import FLEET_ACTIONS, NAME, At, ReleaseTraffic, clause_of
from scripted.adapters.lockstep.fleets.config import FleetConfig
from scripted.adapters.lockstep.fleets.machine import FleetMachine, NoDevice, what_keeps
from scripted.adapters.lockstep.fleets.oracle import FleetOracle
from scripted.adapters.lockstep.fleets.records import FleetRecord, FleetStep, merged
from scripted.adapters.lockstep.fleets.space import FleetSpace
from scripted.adapters.lockstep.places import place_of, relations_of
from scripted.adapters.lockstep.script.execution import ScriptSucceeded
from scripted.adapters.lockstep.script.fleet import role_of
from scripted.core.action import Action
from scripted.core.named import OWN
from scripted.core.placed import Placed
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.run import Run
from scripted.core.written import WrittenTest
from scripted.report.step_log import StepLog

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
        return FleetStep(events, now)

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
            action = what_keeps(engine)
            if action is not None:
                return At(on=engine.name, do=clause_of(action))
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
        return FleetRecord(last, logs, error)

    def as_log(self, records: Sequence[Any], config: Any) -> StepLog:
        """All engines in one table: each word names its engine."""
        del config
        return StepLog(1, 1, tuple([merged(number, one) for number, one in enumerate(records, 1)]))

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

    def run_script(
        self, script: Any, arguments: Mapping[str, Any], *, config: Any, options: Any, mutant: str | None
    ) -> ScriptSucceeded:
        """There is none: a script of several engines is one of an engine. Raises ScriptDefinitionError."""
        del script, arguments, options, mutant
        raise ScriptDefinitionError(
            f"no script and no shell runs on {NAME}; a script makes its fleet itself: use the adapter {OWN}, and "
            f"t.engines({', '.join(map(repr, config.names))})"
        )

    def standalone_test(self, schedules: Sequence[Any], *, name: str) -> WrittenTest:
        """There is none. Raises ScriptDefinitionError."""
        del schedules, name
        raise ScriptDefinitionError(
            "`scripted replay` does a fleet's schedule again; write its test with t.engines(...)"
        )


ADAPTER: Final = FleetAdapter()
