"""One run of one schedule to its verdict; and many runs that begin alike, sharing what they have in common.

A failure is whatever a run raises: an audit of the engine, a broken promise, an assertion of the core.
"""

from __future__ import annotations

import re
import traceback
import zlib
from typing import Final

import msgspec

from engine.scheduler import StepRecord, run_loop
from scripted.actions import Placed
from scripted.checks.conformance import Conformance, why_not_covered
from scripted.checks.digests import check_digests
from scripted.checks.violation import Violation
from scripted.explore.coverage import Cell
from scripted.explore.forks import Frozen
from scripted.explore.schedule import Schedule, limits_of
from scripted.explore.schedule_gate import SimulatedGate

__all__ = ["Failure", "Outcome", "Prefixes", "execute", "finish", "is_not_covered", "is_specified", "record"]

_SIGNATURE_LENGTH: Final = 60
# The executable specification costs half as much again as all other checks. Of the runs that share a beginning, one in
# this many is compared with it, and every run that starts from its beginning.
SPECIFIED_EVERY_RUNS: Final = 2


class Failure(msgspec.Struct, frozen=True):
    """Why a run failed: the exception's type and text, and the step that it came out of.

    ``signature`` is equal for two failures of one invariant, whatever the numbers and names in their texts.
    """

    type: str
    text: str
    step: int
    signature: str

    @classmethod
    def of(cls, exc: Exception, gate: SimulatedGate) -> Failure:
        """What an exception that ended a run says."""
        rids = sorted({life.message.rid for life in gate.checks.clients.lives}, key=len, reverse=True)
        names = "".join(rf"|\b{re.escape(rid)}\b" for rid in rids)
        words = re.sub(rf"\d+|'[^']*'|\[.*\]{names}", "#", str(exc).partition(":")[0])
        place = traceback.extract_tb(exc.__traceback__)[-1].name
        return cls(
            type(exc).__name__, str(exc), gate.step, f"{type(exc).__name__} in {place}: {words[:_SIGNATURE_LENGTH]}"
        )

    def __str__(self) -> str:
        return f"step {self.step}: {self.type}: {self.text}"


class Outcome(msgspec.Struct, frozen=True):
    """How a run ended; ``failure`` None means that every check held."""

    failure: Failure | None
    steps: int
    unreached: tuple[Placed, ...]
    implied: tuple[Placed, ...]
    cells: tuple[Cell, ...]


def execute(schedule: Schedule) -> Outcome:
    """Run a schedule from its beginning."""
    return finish(SimulatedGate(schedule))


def record(schedule: Schedule) -> tuple[Outcome, list[StepRecord]]:
    """Run a schedule and keep every step, the one that it dies in included."""
    gate = SimulatedGate(schedule, record=True)
    outcome = finish(gate)
    assert gate.records is not None
    return outcome, gate.records


def is_specified(extra: tuple[Placed, ...]) -> bool:
    """Whether a run with these additions is compared with the executable specification from where it forks."""
    return zlib.crc32(repr(extra).encode()) % SPECIFIED_EVERY_RUNS == 0


def is_not_covered(schedule: Schedule) -> bool:
    """Whether the executable specification says nothing of such an engine."""
    return why_not_covered(limits_of(schedule.config)) is not None


def finish(gate: SimulatedGate) -> Outcome:
    """Run a gate to its end."""
    failure = None
    try:
        run_loop(gate, gate.scheduler, gate.pipeline, gate)
    except Exception as exc:  # noqa: BLE001 - whatever a broken engine raises is the finding
        failure = Failure.of(exc, gate)
    return Outcome(failure, gate.step, tuple(gate.unreached), tuple(gate.implied), tuple(gate.cells))


def _with_digests_checked(schedule: Schedule) -> Outcome:
    """The search keeps no digests; whether they stand for their steps is seen from the steps of a run of its own."""
    gate = SimulatedGate(schedule, record=True)
    outcome = finish(gate)
    try:
        check_digests(gate.records or ())
    except Violation as exc:
        return msgspec.structs.replace(outcome, failure=Failure.of(exc, gate))
    return outcome


class Prefixes:
    """A base schedule, frozen before each of its steps: a schedule that only adds to it starts where it first differs.

    Which of them are compared with the executable specification depends on what is added alone, so that it is the same
    in every process. ``steps`` ends with the first one in which the base had to be settled; what is added later would
    have come first.
    """

    def __init__(self, base: Schedule) -> None:
        self.base = base
        self._frozen: list[tuple[Frozen[SimulatedGate], Frozen[Conformance]]] = []
        gate = SimulatedGate(base, watch=self._freeze)
        self.outcome = finish(gate)
        if self.outcome.failure is None:
            self.outcome = _with_digests_checked(base)

    @property
    def steps(self) -> int:
        """Steps that can be added to."""
        return len(self._frozen)

    def execute(self, *extra: Placed) -> Outcome:
        """Run the base schedule with these actions more."""
        schedule = self.base.with_placed(extra)
        first = min(placed.step for placed in extra)
        if first > self.steps:
            return execute(schedule)
        frozen, conformance = self._frozen[first - 1]
        gate = frozen.thaw()
        gate.checks.conformance = conformance.thaw() if is_specified(extra) else None
        gate.follow(schedule)
        return finish(gate)

    def _freeze(self, gate: SimulatedGate) -> None:
        gate.watch = None
        if gate.implied:
            return
        conformance, gate.checks.conformance = gate.checks.conformance, None
        assert conformance is not None, "a run from its beginning is compared with the specification"
        self._frozen.append((Frozen(gate), Frozen(conformance)))
        gate.checks.conformance = conformance
        gate.watch = self._freeze
