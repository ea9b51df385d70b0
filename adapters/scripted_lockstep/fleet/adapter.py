"""The adapter ``lockstep-fleet``: engines with roles, their links and one clock, as one machine of the search."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from engine.core.config import EngineConfig
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.common_actions import AdvanceClock
from scripted.core.refusals import ScriptDefinitionError
from scripted.fleets.adapter import FleetAdapter
from scripted.fleets.machine import FleetConfig, FleetMachine, FleetRun, MemberRun
from scripted.fleets.space import FleetSpace
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction
from scripted_lockstep.actions import (
    FailGrammar,
    FailTransfer,
    HoldGrammars,
    HoldLoras,
    HoldTransfers,
    KillStage,
    LoraLoad,
    LoraUnload,
    ReleaseGrammars,
    ReleaseLoras,
    ReleaseTransfers,
    all_actions,
)
from scripted_lockstep.adapter import ADAPTER as LOCKSTEP
from scripted_lockstep.fleet.members import SearchedEngine
from scripted_lockstep.fleet.roles import DECODE
from scripted_lockstep.run_forks import STATES, FrozenRun
from scripted_lockstep.script.execution import ScriptSucceeded
from scripted_lockstep.script.fleet import ROLES, config_of

NAME: Final = "lockstep-fleet"
# Actions that an engine of a fleet lacks, or that a fleet replaces.
_NOT_HERE: Final = (
    FailGrammar, FailTransfer, HoldGrammars, HoldLoras, HoldTransfers, KillStage, LoraLoad, LoraUnload, ReleaseGrammars,
    ReleaseLoras, ReleaseTransfers, AdvanceClock,
)  # fmt: skip
_LEFT_OUT: Final = {"loras", "kept-grammars", "held-grammars", "profile", "scale"}
_SMALL: Final = "engines=p0,d0 page_size=4 chunked_prefill_size=16 max_total_tokens=128"
_PAIR: Final = "engines=p0,p1,d0,d1 page_size=4 chunked_prefill_size=16 max_total_tokens=128"


class LockstepFleets(FleetAdapter):
    """Fleets of engines of this project."""

    name = NAME
    of = DEFAULT_ADAPTER
    roles = ROLES
    inner_actions = tuple(kind for kind in all_actions() if kind not in _NOT_HERE)
    space = FleetSpace(
        NAME, lambda: DECODE.space, left_out=_LEFT_OUT, shared=lambda config: config.model_copy(update={"role": "both"})
    )
    workloads: Mapping[str, str] = {
        "one": f'{_SMALL}; 1 begin on=d0 do="start a prompt=50 new=3"',
        "again": f'{_SMALL}; 1 begin on=d0 do="start a prompt=50"; 14 begin on=d0 do="start b prompt=60 new=3"',
        "several": f'{_SMALL}; 1 begin on=d0 do="start a prompt=50 new=3"; 2 begin on=d0 do="start b prompt=30 seed=1"'
        '; 3 begin on=d0 do="start c prompt=41 new=4"',
        "pair": f'{_PAIR}; 1 begin on=d0 do="start a prompt=50 new=3"; 1 begin on=d1 do="start b prompt=40 new=3"'
        '; 3 begin on=d0 do="start c prompt=33 seed=2"; 4 begin on=d1 do="start e prompt=50"',
    }

    def config_of(self, config: FleetConfig[EngineConfig], name: str) -> EngineConfig:
        return config_of(name, config.engine)

    def new_member(self, machine: FleetMachine, config: FleetConfig, name: str, *, record: bool) -> SearchedEngine:
        run = MemberRun(self.config_of(config, name), DEFAULT_ADAPTER, machine.clock, record=record)
        return SearchedEngine(name, run, config.names)

    def run_script(
        self,
        script: ScriptFunction,
        arguments: Mapping[str, object],
        *,
        config: FleetConfig[EngineConfig],
        options: ScriptOptions,
        mutant: str | None,
    ) -> ScriptSucceeded:
        """Refuse a script: a script with several engines starts from a single one. Raises ScriptDefinitionError."""
        del script, arguments, options, mutant
        raise ScriptDefinitionError(
            f"no script and no shell runs on {NAME}; a script makes its fleet itself: use the adapter "
            f"{DEFAULT_ADAPTER}, and t.engines({', '.join(map(repr, config.names))})"
        )

    # -- mutants: each is searched for in its own adapter's targets --

    def adapter_of(self, mutant: str) -> str:
        return LOCKSTEP.adapter_of(mutant)

    @property
    def contract_names(self) -> tuple[str, ...]:
        return LOCKSTEP.contract_names

    def fresh_mutants(self, count: int, seed: int) -> Mapping[str, str]:
        return LOCKSTEP.fresh_mutants(count, seed)

    def fleet_digest(self, run: FleetRun) -> bytes:
        machine = run.machine
        engines = [one for one in machine.living if isinstance(one, SearchedEngine)]
        known = [(one.name, one.asked, one.serving, one.prefills, one.is_draining) for one in engines]
        return STATES.digest(machine.fleet.links, known)

    def freeze(self, run: FleetRun) -> FrozenRun[FleetRun]:
        return FrozenRun(run, lambda one: [member.run.oracle for member in one.machine.fleet.members])


ADAPTER: Final = LockstepFleets()
