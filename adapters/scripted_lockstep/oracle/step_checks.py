"""The oracle of an engine, after every step and at the end: for scripts of both tiers, the search and replay alike.

It checks the promises of every scheduler, this one's executable specification, and the engine's own audit. It sees
everything that crosses the gate, only reads the scheduler, and is cheap to fork.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engine.core.audit import audit
from engine.core.limits import Limits
from engine.core.messages import (
    CacheEvent,
    CallAnswer,
    Completion,
    ContinueGeneration,
    Event,
    EvictCache,
    Generate,
    GrammarReady,
    LoraRead,
    PagesReceived,
    PagesSent,
    PauseGeneration,
    PipelineFailed,
    PrefillFailed,
    Refusal,
    ReleasePressure,
    Reply,
    SetPressure,
    StatsAnswer,
    TokenOutput,
    ended_by,
)
from engine.core.plan import Microbatch, SendPages
from engine.core.routing.cache_index import CacheMirror
from engine.core.scheduler import Scheduler, StepResult
from scripted.core.account import Life
from scripted.core.oracle import Oracle, Paused
from scripted.core.violation import Violation
from scripted_lockstep.oracle.cache_events import check_mirror
from scripted_lockstep.oracle.growth import check_growth
from scripted_lockstep.oracle.pages import Pages
from scripted_lockstep.oracle.restoring import Twin, check_checkpoint
from scripted_lockstep.oracle.tokens_alone import check_tokens
from scripted_lockstep.specification.conformance import Conformance


class EngineOracle(Oracle):
    """Judges a new or reset engine. As an outbox it also checks that the loop sends a step's replies.

    It shares the account of promises with ``SdkOracle``; this scheduler's executable specification replaces the SDK's
    checks of blocks.

    ``conformance`` compares with the executable specification, unless it is None. With ``audits`` the engine's own
    audit runs after each step, with ``restores`` the engine is restored from a checkpoint when it is at rest, and with
    ``twin`` the restored engine runs beside it. ``pages`` follows the page numbers of plans, for stages that do not
    report their reads.
    """

    def __init__(
        self, limits: Limits, *, audits: bool = True, restores: bool = True, pages: bool = True, twin: bool = False
    ) -> None:
        super().__init__(
            depth=limits.depth,
            batch_requests=limits.most_requests,
            batch_tokens=max(limits.prefill_budget_tokens, limits.decode_budget_tokens),
            prompt_tokens=limits.prefill_budget_tokens,
            block_size=limits.page_size,
            # True while the possible victims are in flight.
            most_in_vain=limits.depth,
        )
        self._retractions = 0
        self.conformance: Conformance | None = Conformance(limits)
        self._audits = audits
        self._restores = restores
        self._pages = Pages(limits) if pages else None
        self._twin = Twin() if twin else None
        # This engine's outgoing transfers: their destination, and their numbers there.
        self._sending: dict[int, tuple[tuple[str, ...], int]] = {}
        self._mirror = CacheMirror(limits.page_size) if limits.kv_events else None
        self._sent: Sequence[Reply] = ()

    def send(self, replies: Sequence[Reply]) -> None:
        self._sent = replies

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Do nothing: ``check_step`` sees them in the step's result."""

    # -- the oracle of a run --

    def after_step(self, events: Sequence[Event], stepped: StepResult, machine: Any, pipeline: Any) -> None:
        """Check one step, and that its replies were sent. Raises Violation or IntegrityError."""
        if stepped.replies and self._sent is not stepped.replies:
            raise Violation(f"step {stepped.step} has replies that the loop has not sent: {stepped.replies}")
        self.check_step(events, stepped, machine.scheduler, corruptions=pipeline.corruptions)

    def at_rest(self, machine: Any) -> None:
        """Check, before the cache is flushed, that every request has ended, the cache and a checkpoint.

        Raises Violation.
        """
        self.account.check_end()
        if self.conformance is None:
            return
        scheduler = machine.scheduler
        self.conformance.check_cache(scheduler)
        if self._restores:
            calls = self.conformance.specification.calls
            is_due = scheduler.failure is None and calls.is_awake and not calls.is_profiling
            check_checkpoint(scheduler, is_due=is_due)

    def at_end(self, machine: Any) -> None:
        """Check an idle and flushed engine: each client got the same output as the request alone. Raises Violation."""
        self.check_end(machine.scheduler)
        if self.conformance is not None:
            specification = self.conformance.specification
            for request in specification.requests:
                check_tokens(request, specification.calls.weights, machine.limits)

    # -- one step --

    def check_step(
        self, events: Sequence[Event], result: StepResult, scheduler: Scheduler, *, corruptions: Sequence[str] = ()
    ) -> None:
        """Check one step. ``corruptions`` are the reads of foreign KV that the pipeline noticed.

        Raises Violation for a broken promise, IntegrityError if the engine's own books do not balance.
        """
        microbatch = result.microbatch
        for event in events:
            self._on_event(event)
        for order in result.transfers:
            if isinstance(order, SendPages):
                self._sending[order.transfer] = order.to, order.to_transfer
        for reply in result.replies:
            self._hear(reply)
        if scheduler.counters.retractions != self._retractions:
            self._retractions = scheduler.counters.retractions
            self.account.lose_blocks(list(_without_memory(self.account.live, scheduler)))
        self.account.check_names()
        if microbatch is not None:
            self._on_launch(microbatch)
        # A step without input and output has changed nothing since the last audit.
        if self._audits and (events or microbatch is not None or result.replies or result.again):
            audit(scheduler)
        if self.conformance is not None:
            self.conformance.check(events, scheduler.now, result, scheduler)
            if self._pages is not None:
                self._pages.follow(events, result, self.conformance.specification)
        if self._twin is not None:
            self._twin.follow(events, result, scheduler)
        if self._mirror is not None:
            check_mirror(self._mirror, result, scheduler.memory)
        if corruptions:
            raise Violation(f"a request read KV that is not its own: {corruptions[0]}")

    def check_refusal(self, message: Generate, refusal: Refusal, ahead: Iterable[Event]) -> None:
        """Check a refusal from before the request's step, with ``ahead`` in front of it. Raises Violation."""
        if self.conformance is not None:
            self.conformance.check_refusal(message, refusal, ahead)

    def check_end(self, scheduler: Scheduler) -> None:
        """Check an idle and flushed engine, whose last step reported its counters. Raises Violation."""
        if scheduler.failure is None and not scheduler.is_fully_idle:
            raise Violation(f"nothing can happen any more, but the engine is busy: {scheduler.books.what_is_busy()}")
        self.account.check_end()
        audit(scheduler)
        if self.conformance is not None:
            check_growth(scheduler)

    # -- in the terms of every scheduler --

    def most_new(self, life: Life) -> int:
        most: int = life.message.sampling.max_new_tokens
        return most

    def _on_event(self, event: Event) -> None:
        account = self.account
        match event:
            case Completion():
                self.land(event.microbatch_id, failed=event.error is not None)
                account.fail([failed.rid for failed in event.errors])
            case Generate():
                account.begin(event)
            case PipelineFailed():
                self._flights.clear()
                account.fail(account.live)
            case GrammarReady() | LoraRead():
                if event.error is not None:
                    account.fail(account.live)
            case PagesSent():
                self._on_sent(event)
            case SetPressure() | ReleasePressure() | EvictCache() | PagesReceived() | PrefillFailed():
                pass
            case _:
                self._on_call(event)

    def _on_sent(self, event: PagesSent) -> None:
        """Fail a prompt that could not be sent."""
        sent = self._sending.pop(event.transfer, None)
        if event.error is not None:
            delivered = [life.message for life in self.account.live.values() if life.message.deliver is not None]
            self.account.fail([one.rid for one in delivered if (one.deliver.to, one.deliver.transfer) == sent])

    def _on_call(self, call: Any) -> None:
        for rid in ended_by(call, self.account.live):
            self.account.abort(rid)
        if isinstance(call, PauseGeneration):
            self.pause(Paused(call.mode.value))
        elif isinstance(call, ContinueGeneration):
            self.resume()
        if call.call_id is not None:
            self.account.ask(call.call_id, type(call).__name__)

    def _hear(self, reply: Any) -> None:
        match reply:
            case TokenOutput():
                reason = None if reply.finish_reason is None else reply.finish_reason.value
                self.account.tell(reply.rid, reply.token_ids, reason)
            case Refusal():
                self.account.refuse(reply.rid, reply.message)
            case CallAnswer() | StatsAnswer():
                self.account.answer(reply.call_id, reply)

    def _on_launch(self, microbatch: Microbatch) -> None:
        self.launch(microbatch.id, microbatch.rids, microbatch.tokens)
        for segment in microbatch.segments:
            count = len(segment.token_ids)
            if segment.sampling is not None:
                self.account.begin_again(segment.rid)
            # The result shows which of its guesses hold; the specification then gives its next position.
            comes_next = None if segment.drafts else segment.start + count
            self.account.compute(segment.rid, segment.start, count, comes_next)


def _without_memory(rids: Iterable[str], scheduler: Scheduler) -> Iterator[str]:
    """Yield the requests that own no memory now."""
    for rid in rids:
        request = scheduler.find_request(rid)
        if request is not None and request.lease is None:
            yield rid
