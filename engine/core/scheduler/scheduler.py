"""The scheduler: a pure state machine. Events in, at most one microbatch and some replies out.

No sockets, threads, torch or clock: the same events at the same times give the same plans, replies and digest. A
request enters by ``Generate``, moves through the books, and leaves by exactly one terminal reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

from engine.core.errors import IntegrityError
from engine.core.instruments import DigestChain, Pressure
from engine.core.limits import Limits
from engine.core.memory import CacheLog, HostTier, KVMemory, SlidingWindowPool
from engine.core.messages import (
    LENGTH,
    STOP,
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    Event,
    FinishReason,
    Generate,
    GetStats,
    GrammarReady,
    OperatorEvent,
    PagesReceived,
    PagesSent,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    PrefillFailed,
    Refusal,
    Reply,
    Sleep,
    StatsAnswer,
    TokenLogprob,
)
from engine.core.plan import DECODE, Copies, Forward, LoraUpdate, Microbatch, Segment, TransferOrder, WeightUpdate
from engine.core.scheduler.admission import Admission
from engine.core.scheduler.books import Books, Launched
from engine.core.scheduler.controls import Controls
from engine.core.scheduler.counters import Counters
from engine.core.scheduler.drafts import note_verified
from engine.core.scheduler.flush_and_update import FlushAndUpdate
from engine.core.scheduler.grammars import Grammars
from engine.core.scheduler.loras import Loras
from engine.core.scheduler.planner import Planner
from engine.core.scheduler.ports import StepResult
from engine.core.scheduler.prompt_logprobs import parts_told
from engine.core.scheduler.replies import ControlCall, output_of
from engine.core.scheduler.request import CHUNKED, DISPATCHED, GONE, RELEASING, RETRACTING, RUNNING, Request
from engine.core.scheduler.sizes import sizes_of, stats_of
from engine.core.scheduler.sleeping import Sleeping
from engine.core.scheduler.time_limits import TimeLimits
from engine.core.scheduler.transfers import Transfers
from engine.core.stats import EngineStats


class Scheduler:
    """One engine's scheduler. ``step`` is the only way to change it."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.memory = KVMemory(
            total_pages=limits.total_pages,
            page_size=limits.page_size,
            rows=limits.rows,
            radix_cache=limits.radix_cache,
            sliding_window=SlidingWindowPool.of(limits),
            host=HostTier.of(limits),
            log=CacheLog(limits.page_size) if limits.kv_events else None,
        )
        self.books = Books()
        self.counters = Counters()
        self.time_limits = TimeLimits(limits.waiting_timeout_s)
        self.grammars = Grammars(limits.max_cached_grammars, self.counters)
        self.transfers = Transfers(limits, self.books, self.memory, self.counters)
        self.planner = Planner(
            limits, self.books, self.memory, self.counters, self.time_limits, self.grammars, self.transfers
        )
        self.digests = DigestChain()
        self.pressure = Pressure(self.memory)
        self.step_number = 0
        self.now = 0.0
        self.failure: PipelineFailed | None = None
        self.last_microbatch: Microbatch | None = None
        self.loras = Loras(limits, self.books, self.memory, self.counters, self.grammars)
        self._admission = Admission(limits, self.books, self.loras)
        flush_and_update = FlushAndUpdate(self.books, self.memory, self.counters, self.grammars)
        self.controls = Controls(limits, self.books, flush_and_update, self.loras, Sleeping(self.books, self.memory))
        self._has_draft_model = limits.has_draft_model
        self._replies: list[Reply] = []
        self._handlers: dict[type, Callable[[Any], None]] = {
            Completion: self._on_completion,
            PipelineFailed: self._on_pipeline_failed,
            GrammarReady: self._on_grammar_ready,
            PagesReceived: self._on_pages_received,
            PagesSent: self._on_pages_sent,
            PrefillFailed: self._on_prefill_failed,
            Generate: self._on_generate,
            Abort: self._on_abort,
            AbortAll: self._on_abort_all,
            PauseGeneration: self._on_pause,
            ContinueGeneration: self._on_continue,
            GetStats: self._on_get_stats,
            **dict.fromkeys(get_args(ControlCall), self._on_control),
            **dict.fromkeys(get_args(OperatorEvent), self.pressure.apply),
        }

    def step(self, events: Sequence[Event], now: float) -> StepResult:
        """Apply ``events`` in order, then plan at most one microbatch. ``now`` is in seconds and never goes back."""
        assert now >= self.now, f"time went back from {self.now} to {now}"
        self.step_number += 1
        self.now = now
        self._replies = []
        handlers = self._handlers
        for event in self.pressure.not_yet_applied(events) if self.pressure.ahead else events:
            handlers[type(event)](event)
        if (deadline := self.time_limits.deadline) is not None and deadline <= now:
            self._end_overdue()
        transfers = self.transfers
        if transfers.deadline is not None:
            transfers.fail_overdue(now)
        calls = self.controls
        if calls.deadline is not None:
            self._replies += calls.answers_due(now)
        retractions = self.counters.retractions
        log = self.memory.log
        # Told before the launch, which may change what LoRAs are resident.
        cache_events = () if log is None else self.loras.named(log.take())
        microbatch = self._launch()
        changed = microbatch is not None or self.counters.retractions != retractions
        ordered: tuple[TransferOrder, ...] = ()
        if transfers.has_news:
            changed, ordered = True, transfers.take_orders()
            self._replies += transfers.take_told()
        replies = tuple(self._replies)
        if self.digests.keeps_steps:
            if events or replies or changed:
                self.digests.add((tuple(events), microbatch, replies, sizes_of(self.books, self.memory)))
            else:
                self.digests.add_quiet()
        # Without a change this step would only be repeated, and without a slot and work the next one plans nothing.
        again = (changed or self.loras.is_postponed) and (self.planner.may_plan or calls.is_due)
        orders = self.grammars.take_orders()
        if log is not None:
            cache_events += log.take()
        return StepResult(self.step_number, microbatch, replies, again, self.deadline, orders, cache_events, ordered)

    # -- looking --

    @property
    def deadline(self) -> float | None:
        """When a request or a transfer runs out of time or a call that waits gives up, whichever is first.

        None when nothing can.
        """
        call, request, transfer = self.controls.deadline, self.time_limits.deadline, self.transfers.deadline
        first = request if call is None else call if request is None else min(call, request)
        return first if transfer is None else transfer if first is None else min(first, transfer)

    @property
    def is_fully_idle(self) -> bool:
        """Nothing in flight, no request owns memory, and nothing waits: as the books define it."""
        return self.books.is_fully_idle

    def refusal_of(
        self,
        message: Generate,
        *,
        queued: int = 0,
        taken: frozenset[str] = frozenset(),
        freed: frozenset[str] = frozenset(),
    ) -> Refusal | None:
        """Why this request would be refused; None when it would be admitted. Changes nothing.

        ``queued`` requests are on their way into the queue before it, and ``taken`` are their rids; those of ``freed``
        are on their way out of the engine.
        """
        return self._admission.refusal_of(message, self.failure, queued=queued, taken=taken, freed=freed)

    def find_request(self, rid: str) -> Request | None:
        """The live request of this rid, or None."""
        return self.books.requests.get(rid)

    def stats(self) -> EngineStats:
        """The counters as they are now."""
        return stats_of(self.step_number, self.counters, self.books, self.memory, self.grammars, self.loras.resident)

    # -- completions --

    def _on_completion(self, completion: Completion) -> None:
        if self.failure is not None:
            return  # It was given up when the pipeline failed.
        in_flight = self.books.in_flight
        if not in_flight or completion.microbatch_id != in_flight[0].microbatch.id:
            raise IntegrityError(
                f"microbatch {completion.microbatch_id} came back, in flight were {self.books.in_flight_ids()}"
            )
        launched = self._land(failed=completion.error is not None)
        if launched.microbatch.is_control:
            self._on_control_done(launched.microbatch, completion.error)
        elif completion.error is not None:
            for request in launched.requests:
                request.in_flight -= 1
                self._on_failed_segment(request, completion.error)
        else:
            self._on_results(launched, completion)

    def _land(self, *, failed: bool) -> Launched:
        """Take the oldest microbatch out of flight. If it failed, some stages may not have copied."""
        launched, host = self.books.land(), self.memory.host
        copies = launched.microbatch.copies
        if copies is not None and host is not None:
            host.land(copies.out, copies.into, failed=failed)
        return launched

    def _on_control_done(self, control: Microbatch, error: str | None) -> None:
        answer = self.controls.finish(control, error)
        if answer is not None:
            self._replies.append(answer)
            if isinstance(control, WeightUpdate):
                self._end_outdated()
        elif error is not None:
            # Only for requests that wait: those that ran with the LoRA would have kept it.
            assert isinstance(control, LoraUpdate), f"nothing asked for {control}"
            for request in self.loras.left_without(control):
                self._end(request, FinishReason.UNAVAILABLE, error=error)

    def _end_outdated(self) -> None:
        """After an update: what waits to be sent to an engine with other weights can never be sent."""
        for request in list(self.books.waiting):
            if request.deliver is not None and request.deliver.weights != self.books.weights:
                wanted = request.deliver.weights or "of the start"
                why = f"its KV was wanted with the weights {wanted!r}, which an update has replaced; ask again"
                self._end(request, FinishReason.UNAVAILABLE, error=why)

    def _on_results(self, launched: Launched, completion: Completion) -> None:
        tokens, logprobs, used = completion.token_ids, completion.logprobs, 0
        accepted, guesses, has_draft_model = iter(completion.accepted), iter(completion.guesses), self._has_draft_model
        if launched.microbatch.mode is not DECODE:
            self._replies += parts_told(launched.microbatch, launched.requests, completion)
        for failed in completion.errors:
            for request in launched.requests:
                if request.rid == failed.rid and not request.is_finished:
                    # While it is in flight: what came for it is dropped with its result.
                    self._end(request, failed.reason, error=failed.error)
        for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True):
            request.in_flight -= 1
            if not segment.emits:
                self._on_chunk(request, segment.start + len(segment.token_ids))
                continue
            if has_draft_model:
                request.guesses = next(guesses, ())
            if segment.drafts:
                count = 1 + next(accepted, 0)
                self._on_verified(request, segment, tokens[used : used + count], logprobs[used : used + count])
                used += count
                continue
            if used < len(tokens):
                self._on_token(request, tokens[used], logprobs[used] if logprobs else None)
            used += 1
        if used != len(tokens):
            raise IntegrityError(
                f"microbatch {completion.microbatch_id} came back with {len(tokens)} tokens, "
                f"but {used} of its segments emit one"
            )
        if self.memory.sliding_window is not None:
            self._slide_windows(launched)

    def _on_verified(
        self, request: Request, segment: Segment, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> None:
        """The result of a decode with drafts: the tokens that were guessed right, and one more."""
        if not 1 <= len(tokens) <= 1 + segment.drafts:
            raise IntegrityError(f"{len(tokens)} tokens came back for {request}, which had {segment.drafts} drafts")
        assert request.lease is not None, f"{request} owned no memory while it was in flight"
        self.counters.drafted_tokens += segment.drafts
        self.counters.accepted_tokens += len(tokens) - 1
        note_verified(request, len(tokens) - 1)
        # The KV of what was guessed wrong is of no use: the next token is computed in its place.
        request.planned_tokens -= segment.drafts - (len(tokens) - 1)
        self.memory.trim(request.lease, request.planned_tokens)
        for place, token in enumerate(tokens):
            if not request.is_finished:
                self._take_token(request, token, logprobs[place] if logprobs else None)
        self._release_if_landed(request)

    def _slide_windows(self, landed: Launched) -> None:
        """Give back the window pages that only this microbatch could still see, also of requests that are parked.

        What is in flight after it for the same request begins where it ended, or later.
        """
        for segment, request in zip(landed.microbatch.segments, landed.requests, strict=True):
            if request.lease is not None:
                end = request.planned_tokens if segment.drafts else segment.start + len(segment.token_ids)
                self.memory.slide(request.lease, end)

    def _on_failed_segment(self, request: Request, error: str) -> None:
        if request.is_finished:
            self._release_if_landed(request)
        else:
            self._end(request, FinishReason.ERROR, error=error)

    def _on_chunk(self, request: Request, confirmed_tokens: int) -> None:
        """The result of a part of a prompt: confirmed KV up to here, but no token."""
        assert request.lease is not None, f"{request} owned no memory while it was in flight"
        self.memory.tree.check_own(request.lease.node)
        if request.place is CHUNKED and not request.in_flight:
            self.memory.publish(request.lease, request.ids[: request.planned_tokens], counts=False)
        if request.deliver is not None:
            # After it was published: what the cache has takes the place of the request's own.
            self.transfers.send(request, confirmed_tokens)
        if request.is_prefilled and not (request.in_flight or request.is_finished):
            self._end_prefilled(request)
            return
        self._release_if_landed(request)

    def _end_prefilled(self, request: Request) -> None:
        """All of a prompt that no token is to follow is confirmed, and sent if it was to be."""
        assert request.lease is not None, f"{request} owned no memory at its end"
        self.memory.publish(request.lease, request.ids, counts=True)
        self._end(request, LENGTH)

    def _on_token(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """The result of a last chunk or of a decode: one token, unless the request ended in the meantime."""
        if not request.is_finished:
            self._take_token(request, token, logprob)
        self._release_if_landed(request)

    def _take_token(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        if request.place is DISPATCHED:
            assert request.lease is not None
            self.memory.publish(request.lease, request.ids, counts=True)
            request.place = RUNNING
            self.books.running[request.rid] = request
        request.ids.append(token)
        self.counters.generated_tokens += 1
        reason = self._why_finished(request, token)
        if reason is not None:
            self._end(request, reason, token=token, logprob=logprob)
        else:
            self._replies.append(output_of(request, token=token, logprob=logprob))

    def _why_finished(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_ids:
            return STOP
        return LENGTH if len(request.ids) >= request.limit_tokens else None

    def _on_pipeline_failed(self, failed: PipelineFailed) -> None:
        """Nothing in flight will come back: every request ends with an error that names the dead process."""
        self.failure = self.failure or failed
        while self.books.in_flight:
            for request in self._land(failed=True).requests:
                request.in_flight = 0
        self.transfers.give_up()
        for request in list(self.books.releasing):
            self._release_if_landed(request)
        for request in list(self.books.requests.values()):
            self._end(request, FinishReason.ERROR, error=str(failed))

    # -- transfers --

    def _on_pages_received(self, received: PagesReceived) -> None:
        request = self.transfers.received(received)
        if request is not None:
            self._release_if_landed(request)

    def _on_pages_sent(self, sent: PagesSent) -> None:
        request = self.transfers.sent(sent)
        if request is None:
            return
        if sent.error is not None and not request.is_finished:
            self._end(request, FinishReason.ERROR, error=sent.error)
        elif request.is_prefilled and not (request.in_flight or request.is_finished):
            self._end_prefilled(request)
        else:
            self._release_if_landed(request)

    def _on_prefill_failed(self, failed: PrefillFailed) -> None:
        self.transfers.fail(failed.transfer)

    # -- requests --

    def _on_generate(self, message: Generate) -> None:
        refusal = self.refusal_of(message)
        if refusal is not None:
            self.counters.requests_refused += 1
            self._replies.append(refusal)
            return
        self.counters.requests_started += 1
        self.counters.prompt_tokens += len(message.prompt_ids)
        request = self._admission.request_of(message, self.counters.requests_started)
        if message.sampling.grammar is not None:
            self.grammars.take(request, message.sampling.grammar)
        self.time_limits.enter(request, message, self.now)
        self.books.enqueue(request)

    def _on_grammar_ready(self, ready: GrammarReady) -> None:
        for request in self.grammars.on_ready(ready):
            self._end(request, ready.reason, error=ready.error)

    def _on_abort(self, abort: Abort) -> None:
        request = self.books.requests.get(abort.rid)
        if request is not None:
            self._end(request, abort.finish_reason)
        if abort.call_id is not None:
            state = "aborted" if request is not None else "not alive, nothing to abort"
            self._answer(abort.call_id, ok=True, message=f"{abort.rid}: {state}")

    def _on_abort_all(self, abort: AbortAll) -> None:
        live = list(self.books.requests.values())
        for request in live:
            self._end(request, FinishReason.ABORT)
        if abort.call_id is not None:
            self._answer(abort.call_id, ok=True, message=f"aborted {len(live)} requests")

    def _end_overdue(self) -> None:
        for request in self.time_limits.over(self.now):
            self._end(request, FinishReason.TIMEOUT, error=self.time_limits.why(request, self.now))

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        token: int | None = None,
        logprob: TokenLogprob | None = None,
        error: str | None = None,
    ) -> None:
        """End a request; every end comes here: out of place and registry, one terminal reply, memory freed once."""
        assert not request.is_finished, f"{request} ends twice: {request.finish_reason}, then {reason}"
        request.finish_reason, request.error = reason, error
        request.ended_by_token = token is not None
        self.books.take_out(request)
        self.time_limits.leave(request)
        del self.books.requests[request.rid]
        self._replies.append(output_of(request, token=token, logprob=logprob))
        self.counters.count_end(reason)
        if request.lease is None:
            self._forget(request)
        elif request.in_flight:
            # The pages stay until the last microbatch or transfer that uses them is back; its result is dropped.
            if self.books.open_transfers:
                self.transfers.stop(request)
            request.place = RELEASING
            self.books.releasing.append(request)
        else:
            self._free(request)

    def _release_if_landed(self, request: Request) -> None:
        """Do what had to wait for a request's last microbatch in flight: release it or send it to the queue."""
        if request.in_flight:
            return
        if request.place is RELEASING:
            self.books.take_out(request)
            self._free(request)
        elif request.place is RETRACTING:
            self.planner.retract(request)

    def _free(self, request: Request) -> None:
        assert request.lease is not None, f"{request} is freed, but owns no memory"
        if request.ended_by_token:
            # All but the newest token have confirmed KV. An aborted or failed request publishes nothing.
            self.memory.publish(request.lease, request.ids[:-1], counts=True)
        self.memory.release(request.lease)
        request.lease = None
        self._forget(request)

    def _forget(self, request: Request) -> None:
        request.place = GONE
        self.grammars.let_go(request)

    # -- operators' calls --

    def _on_control(self, call: ControlCall) -> None:
        if isinstance(call, Sleep):
            self._stop_requests(call.mode)
        answer = self.controls.ask(call, self.now)
        if answer is not None:
            self._replies.append(answer)

    def _on_pause(self, pause: PauseGeneration) -> None:
        self.books.paused = pause.mode
        self._stop_requests(pause.mode)
        self._answer(pause.call_id, ok=True, message=f"paused ({pause.mode}): {self.books.what_is_busy()}")

    def _stop_requests(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            self._on_abort_all(AbortAll())
        elif mode is PauseMode.RETRACT:
            self.planner.retract_all()

    def _on_continue(self, message: ContinueGeneration) -> None:
        self.books.paused = None
        self._answer(message.call_id, ok=True, message="continued")

    def _on_get_stats(self, message: GetStats) -> None:
        self._replies.append(StatsAnswer(call_id=message.call_id, stats=self.stats()))

    def _answer(self, call_id: str, *, ok: bool, message: str) -> None:
        self._replies.append(CallAnswer(call_id=call_id, ok=ok, message=message))

    # -- launching --

    def _launch(self) -> Microbatch | None:
        if self.failure is not None:
            self._replies += self.controls.give_up(str(self.failure))
            return None
        control = self.controls.microbatch(self.counters.forward_ct)
        if control is not None:
            return self._book(control, ())
        plan = self.planner.plan(self.now)
        if plan is None:
            return None
        self.planner.check_budget(plan)
        forward = Forward(self.counters.forward_ct, plan.mode, tuple(plan.segments), self._copies_due())
        return self._book(forward, tuple(plan.requests))

    def _copies_due(self) -> Copies | None:
        """The copies for the microbatch that is launched now, None when none are due.

        Stages follow microbatches in launch order. So a page that has left the pool is read before what this or a later
        microbatch computes in its place, and a page that is loaded is there before it is used.
        """
        host = self.memory.host
        if host is None or not host.has_due:
            return None
        copies = Copies(*host.launch())
        self.counters.host_pages_written += len(copies.out)
        self.counters.host_pages_loaded += len(copies.into)
        return copies

    def _book(self, microbatch: Microbatch, requests: tuple[Request, ...]) -> Microbatch:
        self.counters.forward_ct += 1
        self.books.launch(Launched(microbatch, requests, self.step_number))
        self.last_microbatch = microbatch
        return microbatch
