"""The oracle of the search: all checks of scripts, over the engine's machine and the simulated pipeline."""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import CacheEvent, Event, Reply
from engine.scheduler import StepResult
from scripted.adapters.lockstep.machine import EngineMachine
from scripted.adapters.lockstep.oracle.step_checks import Checks
from scripted.adapters.lockstep.oracle.tokens_alone import check_tokens
from scripted.adapters.lockstep.simulated.pipeline import SimulatedPipeline
from scripted.core.violation import Violation


class EngineOracle(Checks):
    _sent: Sequence[Reply] = ()

    def send(self, replies: Sequence[Reply]) -> None:
        self._sent = replies

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """``check_step`` sees them in the step's result."""

    def after_step(
        self, events: Sequence[Event], stepped: StepResult, machine: EngineMachine, pipeline: SimulatedPipeline
    ) -> None:
        """Look at one step, and whether its replies were sent. Raises Violation or IntegrityError."""
        if stepped.replies and self._sent is not stepped.replies:
            raise Violation(f"step {stepped.step} has replies that the loop has not sent: {stepped.replies}")
        self.check_step(events, stepped, machine.scheduler, corruptions=pipeline.corruptions)

    def at_rest(self, machine: EngineMachine) -> None:
        """Every request has ended, and the cache is still there. Raises Violation."""
        self.check_rest(machine.scheduler)

    def at_end(self, machine: EngineMachine) -> None:
        """The engine is idle and flushed; what each client was told is what it is told alone. Raises Violation."""
        self.check_end(machine.scheduler)
        if self.conformance is not None:
            specification = self.conformance.specification
            for request in specification.requests:
                check_tokens(request, specification.calls.weights, machine.limits)
