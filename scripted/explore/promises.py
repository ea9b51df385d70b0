"""Promises of the engine that its own audit does not make: who may wait, who must not own memory, what is counted.

Looked at after each step from the live books, and never from the answers, which are the ledger's.
"""

from __future__ import annotations

from engine.messages import PauseMode
from engine.plan import ForwardMode
from engine.scheduler import Scheduler, StepResult
from engine.scheduler.planner import ADMISSION_TRIES_LIMIT_REQUESTS, PASSED_OVER_LIMIT_REQUESTS
from scripted.explore.ledger import Violation

__all__ = ["Promises"]


class Promises:
    """Checks over one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._retractions = 0

    def check(self, result: StepResult, *, missing: bool) -> None:
        """After a step; ``missing`` says that results are still to come. Raises Violation."""
        books, memory = self._scheduler.books, self._scheduler.memory
        if result.deadline is not None and result.deadline <= self._scheduler.now:
            raise Violation(f"a flush waits beyond its deadline: it is {self._scheduler.now}, it was {result.deadline}")
        if (
            books.paused in (PauseMode.RETRACT, PauseMode.ABORT)
            and not missing
            and memory.rows.free != memory.rows.total
        ):
            raise Violation(
                f"generation is paused ({books.paused}), nothing is in flight, but somebody owns a row: {books.live()}"
            )
        retracted = self._scheduler.counters.retractions != self._retractions
        self._retractions = self._scheduler.counters.retractions
        if books.waiting:
            self._check_queue()
            if not retracted and self._could_start(result):
                self._check_nobody_is_held_up()

    def check_hits(self) -> None:
        """When all have ended: a prefix is hit when a prompt is confirmed and when its request ends, never by parts."""
        counters = self._scheduler.counters
        most = 2 * counters.requests_started + counters.retractions
        for node in self._scheduler.memory.tree.nodes():
            if node.hit_count > most:
                raise Violation(f"{node} has {node.hit_count} hits, but {most} at most were earned")

    def _check_queue(self) -> None:
        most = self._scheduler.limits.max_queued_requests
        new = [request.rid for request in self._scheduler.books.waiting if not request.retractions]
        if len(new) > most:
            raise Violation(f"the queue took {', '.join(new)}, but max_queued_requests is {most}")

    def _could_start(self, result: StepResult) -> bool:
        """Whether this step had a slot in the pipeline and did not use it for a prompt."""
        if result.microbatch is not None:
            return result.microbatch.mode is ForwardMode.DECODE
        return len(self._scheduler.books.in_flight) < self._scheduler.limits.depth

    def _check_nobody_is_held_up(self) -> None:
        """Nobody waits who would fit, unless it is for one that was passed over too often."""
        scheduler = self._scheduler
        books, memory = scheduler.books, scheduler.memory
        if (
            not memory.rows.free
            or books.paused is not None
            or books.chunked is not None
            or scheduler.failure is not None
        ):
            return
        if any(request.passed_over >= PASSED_OVER_LIMIT_REQUESTS for request in books.waiting):
            return
        for request in books.waiting[:ADMISSION_TRIES_LIMIT_REQUESTS]:
            if memory.pages_for(len(request.ids)) + len(books.running) <= memory.available_pages:
                raise Violation(f"{request.rid} fits and waits behind {books.waiting[0].rid}, but nobody starts it")
