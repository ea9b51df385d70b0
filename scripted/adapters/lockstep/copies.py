"""Runs of the engine that are frozen and thawed; two thawed runs in three are compared with the specification."""

from __future__ import annotations

import zlib
from typing import Final

from engine.scheduler import Launched
from scripted.adapters.lockstep.specification.conformance import Conformance
from scripted.core.forks import Copier, Frozen
from scripted.core.placed import Placed
from scripted.core.run import Run

__all__ = ["COPIER", "UNSPECIFIED_EVERY_RUNS", "FrozenRun", "is_specified"]

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


class FrozenRun:
    """A run as it is now, and beside it the specification's state, so that a run without it does not copy it.

    Which runs are compared with the specification depends on what is added alone, so that it is the same in every
    process.
    """

    def __init__(self, run: Run) -> None:
        conformance, run.oracle.checks.conformance = run.oracle.checks.conformance, None
        assert conformance is not None, "a run from its beginning is compared with the specification"
        self._run: Frozen[Run] = Frozen(run, COPIER)
        self._conformance: Frozen[Conformance] = Frozen(conformance, COPIER)
        run.oracle.checks.conformance = conformance

    def thaw(self, extra: tuple[Placed, ...]) -> Run:
        """A run that goes on from there and shares nothing that can change."""
        run = self._run.thaw()
        run.oracle.checks.conformance = self._conformance.thaw() if is_specified(extra) else None
        return run


def is_specified(extra: tuple[Placed, ...]) -> bool:
    """Whether a run with these additions is compared with the executable specification from where it forks."""
    return zlib.crc32(repr(extra).encode()) % UNSPECIFIED_EVERY_RUNS > 0
