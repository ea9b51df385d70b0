"""All checks of an engine, after every step and at the end: for scripts of both tiers, the search and replay alike.

One object of plain parts, cheap to fork. It is given what crosses the gate and reads the scheduler without changing it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.integrity import audit
from engine.limits import Limits
from engine.messages import Event
from engine.scheduler import Scheduler, StepResult
from scripted.adapters.lockstep.oracle.client_account import ClientAccount
from scripted.adapters.lockstep.oracle.counters import check_idle, compare_counts
from scripted.adapters.lockstep.oracle.growth import check_growth
from scripted.adapters.lockstep.oracle.pages import check_leases
from scripted.adapters.lockstep.oracle.restoring import check_checkpoint
from scripted.adapters.lockstep.specification.conformance import Conformance
from scripted.core.violation import Violation

__all__ = ["Checks"]


class Checks:
    """Made for a new or reset engine. ``clients`` is the account of what each client was told.

    ``conformance`` compares with the executable specification; None leaves that out. ``audits`` also runs the engine's
    own audit after each step, ``restores`` restores the engine from a checkpoint when it is at rest.
    """

    def __init__(self, limits: Limits, *, audits: bool = True, restores: bool = True) -> None:
        self._limits = limits
        self._audits = audits
        self._restores = restores
        self.clients = ClientAccount(limits)
        self.conformance: Conformance | None = Conformance(limits)

    def after_step(
        self, events: Sequence[Event], result: StepResult, scheduler: Scheduler, *, corruptions: Sequence[str] = ()
    ) -> None:
        """Check one step. ``corruptions`` are reads of KV that was not the reader's, as far as the pipeline can tell.

        Raises Violation for a broken promise, IntegrityError where the engine's own books do not balance.
        """
        self.clients.follow(events, result, scheduler.now)
        if result.deadline is not None and result.deadline <= scheduler.now:
            late = f"it is {scheduler.now}, it was {result.deadline}"
            raise Violation(f"a call or a request waits beyond its deadline: {late}")
        # A step without input and output has changed nothing that was not looked at after the one before.
        if events or result.microbatch is not None or result.replies or result.again:
            if self._audits:
                audit(scheduler)
            compare_counts(self.clients.ledger, scheduler)
            self.clients.ledger.pages.compare(scheduler, result.microbatch)
            check_leases(scheduler.books, self._limits)
        if self.conformance is not None:
            self.conformance.check(events, scheduler.now, result, scheduler)
        if corruptions:
            raise Violation(f"a request read KV that is not its own: {corruptions[0]}")

    def at_rest(self, scheduler: Scheduler) -> None:
        """Everything has ended, and the cache is still there. Raises Violation."""
        self.clients.check_end()
        if self.conformance is not None:
            self.conformance.check_cache(scheduler)
        if self._restores:
            check_checkpoint(scheduler)

    def at_end(self, scheduler: Scheduler) -> None:
        """The engine is idle and flushed, and was asked for its counters in its last step. Raises Violation."""
        memory = scheduler.memory
        if scheduler.failure is None and not scheduler.is_fully_idle:
            raise Violation(f"nothing can happen any more, but the engine is busy: {scheduler.books.what_is_busy()}")
        self.clients.check_end()
        audit(scheduler)
        if memory.pages.free != memory.pages.total or memory.rows.free != memory.rows.total:
            raise Violation(f"the engine is idle and flushed, but has {memory.pages} and {memory.rows}")
        if scheduler.books.requests or scheduler.books.live():
            raise Violation(f"the engine is idle, but knows {scheduler.books.live()}")
        if self.conformance is not None:
            check_growth(scheduler)
        stats = self.clients.ledger.stats.newest
        if stats is not None:
            check_idle(scheduler, stats)
