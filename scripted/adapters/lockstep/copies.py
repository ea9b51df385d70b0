"""Runs of the engine, frozen, thawed and told apart; two thawed ones in three are compared with the specification."""

from __future__ import annotations

import zlib
from typing import Final

from engine.routing import CachePicture
from engine.scheduler import Launched, Scheduler
from engine.scheduler.counters import Counters
from scripted.adapters.lockstep.engine_oracle import EngineOracle
from scripted.adapters.lockstep.oracle.step_checks import Checks
from scripted.adapters.lockstep.simulated.pipeline import SimulatedPipeline
from scripted.adapters.lockstep.specification.calls import SpecifiedCalls
from scripted.adapters.lockstep.specification.conformance import Conformance
from scripted.adapters.lockstep.specification.loras import SpecifiedLoras
from scripted.adapters.lockstep.specification.memory import SpecifiedMemory
from scripted.adapters.lockstep.specification.specification import Specification
from scripted.core.account import Account
from scripted.core.forks import Copier, Frozen
from scripted.core.results import Results
from scripted.core.run import Run
from scripted.core.states import StateReader

# The executable specification costs as much again as all other checks. Of the runs that share a beginning one in this
# many is not compared with it; every run that starts from its beginning is.
UNSPECIFIED_EVERY_RUNS: Final = 3

COPIER: Final = Copier(
    # Frozen itself, but its requests are the live ones.
    rebuilt={
        Launched: (
            lambda launched: launched.requests,
            lambda launched, requests: Launched(launched.microbatch, tuple(requests), launched.step),
        )
    },
    uniform=True,
)


# Of the counters three are used again: they number microbatches, requests and weights.
_USED_COUNTERS: Final = {"forward_ct", "requests_started", "weights_version"}
STATES: Final = StateReader({
    Account: ("calls",),
    CachePicture: ("next", "newest"),
    Checks: ("conformance",),
    Conformance: ("_load_at",),
    Counters: set(Counters.__slots__) - _USED_COUNTERS,
    EngineOracle: ("_sent",),
    Results: ("_has_kept", "_in_vain"),
    Scheduler: ("_handlers", "_replies", "digests", "last_microbatch"),
    SimulatedPipeline: ("_describes", "_failed", "_microbatches", "_tokens", "last_microbatch"),
    Specification: ("replies", "totals"),
    SpecifiedCalls: ("_totals",),
    SpecifiedLoras: ("_totals",),
    SpecifiedMemory: ("evictions",),
})  # fmt: skip


class FrozenRun:
    """A run as it is now, and beside it the specification's state, so that a run without it does not copy it.

    Which runs are compared with the specification depends on their names alone, so that it is the same in every
    process.
    """

    def __init__(self, run: Run) -> None:
        conformance, run.oracle.conformance = run.oracle.conformance, None
        assert conformance is not None, "a run from its beginning is compared with the specification"
        self._run: Frozen[Run] = Frozen(run, COPIER)
        self._conformance: Frozen[Conformance] = Frozen(conformance, COPIER)
        run.oracle.conformance = conformance

    def thaw(self, name: str) -> Run:
        """A run that goes on from there and shares nothing that can change."""
        run = self._run.thaw()
        run.oracle.conformance = self._conformance.thaw() if is_specified(name) else None
        return run


def is_specified(name: str) -> bool:
    """Whether a run of this name is compared with the executable specification from where it forks."""
    return not name or zlib.crc32(name.encode()) % UNSPECIFIED_EVERY_RUNS > 0
