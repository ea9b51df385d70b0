"""The production gate with every invariant on: all of the books are checked when that is cheap, and every few steps.

Named in a server's settings by its dotted path. A book that does not balance ends the scheduler with an IntegrityError,
so a run under load fails with the step that broke it.
"""

from __future__ import annotations

from engine.core.audit import audit
from engine.core.scheduler.ports import Step, StepResult
from engine.server.scheduler_process.gate_context import GateContext
from engine.server.scheduler_process.live_gate import LiveGate

# An audit costs as much as all that is cached and alive: with a full cache of 1,000 pages about as much as ten steps.
# Of a small tree it is done after every step.
STEPS_BETWEEN_AUDITS = 8
SMALL_TREE_NODES = 128


class AuditingGate(LiveGate):
    """Feeds the loop from the real world and audits the scheduler before each wait."""

    def __init__(self, context: GateContext) -> None:
        super().__init__(context)
        self._scheduler = context.scheduler

    def next_step(self, previous: StepResult | None) -> Step | None:
        """Audit, then wait. Raises IntegrityError when something does not balance."""
        if previous is not None and (self._is_cheap or previous.step % STEPS_BETWEEN_AUDITS == 0):
            audit(self._scheduler)
        return super().next_step(previous)

    @property
    def _is_cheap(self) -> bool:
        return self._scheduler.is_fully_idle or self._scheduler.memory.tree.node_count <= SMALL_TREE_NODES


AUDITING_GATE = f"{AuditingGate.__module__}:{AuditingGate.__name__}"
