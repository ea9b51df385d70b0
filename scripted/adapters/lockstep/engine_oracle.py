"""The oracle of the search: all checks of scripts, over the engine's machine and the simulated pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.limits import Limits
from engine.messages import Event, Reply
from engine.scheduler import StepResult
from scripted.adapters.lockstep.machine import EngineMachine
from scripted.adapters.lockstep.oracle.step_checks import Checks
from scripted.adapters.lockstep.oracle.tokens_alone import check_tokens
from scripted.adapters.lockstep.simulated.pipeline import SimulatedPipeline
from scripted.core.account import Account
from scripted.core.violation import Violation

__all__ = ["EngineOracle"]


class EngineOracle:
    """It is also the loop's outbox. ``restores`` is for few runs: it costs as much as a run.

    ``pages`` is for stages that do not say what was read, as the simulated pipeline does.
    """

    def __init__(self, limits: Limits, *, restores: bool, pages: bool = True) -> None:
        self.checks = Checks(limits, restores=restores, pages=pages)
        self._limits = limits
        self._sent: Sequence[Reply] = ()

    def send(self, replies: Sequence[Reply]) -> None:
        """The outbox of the loop."""
        self._sent = replies

    @property
    def account(self) -> Account:
        """Who is alive, and what each client was told."""
        return self.checks.account

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return self.checks.is_settled

    @property
    def is_paused(self) -> bool:
        """Generation is paused, as far as clients were told."""
        return self.checks.paused is not None

    @property
    def names(self) -> Iterable[str]:
        """The rids of all requests."""
        return self.checks.names

    def is_live(self, rid: str) -> bool:
        """A request of this rid has begun and not ended."""
        return self.checks.is_live(rid)

    def after_step(
        self, events: Sequence[Event], stepped: StepResult, machine: EngineMachine, pipeline: SimulatedPipeline
    ) -> None:
        """Look at one step, and whether its replies were sent. Raises Violation or IntegrityError."""
        if stepped.replies and self._sent is not stepped.replies:
            raise Violation(f"step {stepped.step} has replies that the loop has not sent: {stepped.replies}")
        self.checks.after_step(events, stepped, machine.scheduler, corruptions=pipeline.corruptions)

    def at_rest(self, machine: EngineMachine) -> None:
        """Every request has ended, and the cache is still there. Raises Violation."""
        self.checks.at_rest(machine.scheduler)

    def at_end(self, machine: EngineMachine) -> None:
        """The engine is idle and flushed; what each client was told is what it is told alone. Raises Violation."""
        self.checks.at_end(machine.scheduler)
        if self.checks.conformance is not None:
            specification = self.checks.conformance.specification
            for request in specification.requests:
                check_tokens(request, specification.calls.weights, self._limits)
