"""Gates for the tests of supervision: one that breaks in a step, one that breaks before there is any."""

from __future__ import annotations

from engine.core.messages import Generate
from engine.core.scheduler.ports import Step, StepResult
from engine.server.scheduler_process.gate_context import GateContext
from engine.server.scheduler_process.live_gate import LiveGate


class BreakingGate(LiveGate):
    """Serves until a request for priority 13 comes."""

    def next_step(self, previous: StepResult | None) -> Step | None:
        step = super().next_step(previous)
        for event in step.events if step is not None else ():
            if isinstance(event, Generate) and event.priority == 13:
                raise ZeroDivisionError("thirteen")
        return step


def stillborn_gate(context: GateContext) -> LiveGate:
    raise ValueError(f"this gate never works, and {context.gate_options_are!r} is no field")  # type: ignore[attr-defined]
