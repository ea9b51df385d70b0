"""Freezes, thaws and compares runs of the engine; two thawed runs in three are compared with the specification."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

import msgspec

from engine.core.routing.cache_index import CacheMirror
from engine.core.scheduler import Launched, Scheduler
from engine.core.scheduler.counters import Counters
from scripted.core.account import Account
from scripted.core.action import RunLike
from scripted.core.forks import Copier, Frozen
from scripted.core.results import Results
from scripted.core.states import StateReader
from scripted_lockstep.oracle.step_checks import EngineOracle
from scripted_lockstep.simulated.grammar import HeldGrammars
from scripted_lockstep.simulated.pipeline import SimulatedPipeline
from scripted_lockstep.specification.calls import SpecifiedCalls
from scripted_lockstep.specification.conformance import Conformance
from scripted_lockstep.specification.loras import SpecifiedLoras
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.specification import Specification

# The executable specification costs as much as all other checks. Of the runs that share a prefix, one in this many is
# not compared with it; runs from the start always are.
UNSPECIFIED_EVERY_RUNS: Final = 3

COPIER: Final = Copier(
    # Frozen, but with references to live requests.
    rebuilt={
        Launched: (
            lambda launched: launched.requests,
            lambda launched, requests: msgspec.structs.replace(launched, requests=tuple(requests)),
        )
    },
    uniform=True,
)


# Only three counters are needed, which number microbatches, requests and weights.
_USED_COUNTERS: Final = {"forward_ct", "requests_started", "weights_version"}
STATES: Final = StateReader({
    Account: ("calls", "preemptions"),
    CacheMirror: ("next", "newest"),
    Conformance: ("_load_at",),
    Counters: set(Counters.__slots__) - _USED_COUNTERS,
    EngineOracle: ("_retractions", "_sent", "conformance"),
    HeldGrammars: ("failed",),
    Results: ("_has_kept", "_ineffective_holds"),
    Scheduler: ("_handlers", "_owners", "_replies", "digests", "hooks", "last_microbatch"),
    SimulatedPipeline: ("_describes", "_failed", "_microbatches", "_tokens", "last_microbatch"),
    Specification: ("replies", "totals"),
    SpecifiedCalls: ("_totals",),
    SpecifiedLoras: ("_totals",),
    SpecifiedMemory: ("evictions",),
})  # fmt: skip


_RunT = TypeVar("_RunT", bound=RunLike)


class FrozenRun(Generic[_RunT]):
    """A frozen run, and separately the specification's states, so that a run without them does not copy them.

    ``oracles`` are the oracles of a run's engines, whose steps are compared with the specification. Only a run's name
    decides whether it is compared, so that every process decides alike.
    """

    def __init__(self, run: _RunT, oracles: Callable[[_RunT], Sequence[EngineOracle]]) -> None:
        self._oracles = oracles
        conformances = [oracle.conformance for oracle in oracles(run)]
        for oracle in oracles(run):
            oracle.conformance = None
        self._run: Frozen[_RunT] = Frozen(run, COPIER)
        self._conformances: Frozen[list[Conformance | None]] = Frozen(conformances, COPIER)
        for oracle, conformance in zip(oracles(run), conformances, strict=True):
            oracle.conformance = conformance

    def thaw(self, name: str) -> _RunT:
        """Return a run that continues from this state and shares nothing mutable."""
        run = self._run.thaw()
        if is_specified(name):
            for oracle, conformance in zip(self._oracles(run), self._conformances.thaw(), strict=True):
                oracle.conformance = conformance
        return run


def is_specified(name: str) -> bool:
    """Return whether a run of this name is compared with the executable specification after its fork."""
    return not name or zlib.crc32(name.encode()) % UNSPECIFIED_EVERY_RUNS > 0
