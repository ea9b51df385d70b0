"""The scheduler: a pure state machine. Events in, at most one microbatch and some replies out.

No sockets, threads, torch or clock: the same events at the same times give the same plans, replies and digest. A
request enters by ``Generate``, moves through the books, and leaves by exactly one terminal reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, get_args

import msgspec

from engine.core.errors import IntegrityError
from engine.core.instruments import DigestChain, Pressure
from engine.core.limits import Limits
from engine.core.messages import (
    LENGTH,
    STOP,
    Abort,
    AbortAll,
    Completion,
    ContinueGeneration,
    Event,
    FinishReason,
    Generate,
    GetStats,
    OperatorEvent,
    PauseGeneration,
    PipelineFailed,
    Refusal,
    StatsAnswer,
    TokenLogprob,
)
from engine.core.plan import DECODE, Copies, Forward, Microbatch, Segment
from engine.core.scheduler.admission import Admission
from engine.core.scheduler.books import Launched
from engine.core.scheduler.core import Core
from engine.core.scheduler.deadlines import earliest
from engine.core.scheduler.feature import Feature, Hooks
from engine.core.scheduler.features import Features
from engine.core.scheduler.planner import Planner
from engine.core.scheduler.ports import StepResult, StepShare
from engine.core.scheduler.replies import output_of
from engine.core.scheduler.request import CHUNKED, DISPATCHED, RUNNING, Request
from engine.core.scheduler.sizes import sizes_of, stats_of
from engine.core.stats import EngineStats

_OPERATOR_EVENTS: Final = get_args(OperatorEvent)


class Scheduler(Core):
    """One engine's scheduler. ``step`` is the only way to change it."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self.features = Features.of(self)
        self.hooks = Hooks(self.features)
        self.planner = Planner(self)
        self.digests = DigestChain()
        self.pressure = Pressure(self.memory)
        self.failure: PipelineFailed | None = None
        self.last_microbatch: Microbatch | None = None
        self._admission = Admission(self, self.features)
        self._owners: dict[type, Feature] = {one.control: one for one in self.features if one.control is not None}
        self._handlers: dict[type, Callable[[Any], None]] = {
            Completion: self._on_completion,
            PipelineFailed: self._on_pipeline_failed,
            Generate: self._on_generate,
            Abort: self._on_abort,
            AbortAll: self._on_abort_all,
            PauseGeneration: self._on_pause,
            ContinueGeneration: self._on_continue,
            GetStats: self._on_get_stats,
            **dict.fromkeys(_OPERATOR_EVENTS, self.pressure.apply),
        }
        for feature in self.features:
            if type(feature).handlers is not Feature.handlers:
                self._handlers |= feature.handlers()

    def step(self, events: Sequence[Event], now: float) -> StepResult:
        """Apply ``events`` in order, then plan at most one microbatch. ``now`` is in seconds and never goes back."""
        assert now >= self.now, f"time went back from {self.now} to {now}"
        self.step_number += 1
        self.now = now
        self._replies = []
        handlers, hooks = self._handlers, self.hooks
        for event in self.pressure.not_yet_applied(events) if self.pressure.ahead else events:
            handlers[type(event)](event)
        for feature in hooks.on_time:
            if feature.deadline is not None:
                feature.on_time(now)
        retractions = self.counters.retractions
        microbatch = self._launch()
        changed = microbatch is not None or self.counters.retractions != retractions
        share: StepShare = {}
        for feature in hooks.report:
            if feature.report(share):
                changed = True
        replies = tuple(self._replies)
        if self.digests.keeps_steps:
            if events or replies or changed:
                self.digests.add((tuple(events), microbatch, replies, sizes_of(self)))
            else:
                self.digests.add_quiet()
        # Without a change the next step would only repeat this one; without a slot or work it would plan nothing.
        again = changed and (self.planner.may_plan or (bool(hooks.has_more) and self._has_more))
        log = self.memory.log
        if log is not None and (cache_events := log.take()):
            share["cache_events"] = cache_events
        if not share:
            return StepResult(self.step_number, microbatch, replies, again, self.deadline)
        return StepResult(self.step_number, microbatch, replies, again, self.deadline, **share)

    @property
    def _has_more(self) -> bool:
        """Return whether a feature could launch another microbatch at once."""
        return any(feature.has_more for feature in self.hooks.has_more)

    # -- reading --

    @property
    def deadline(self) -> float | None:
        """The earliest time at which a request, a transfer or a waiting call times out; None if nothing can."""
        first = None
        for feature in self.hooks.on_time:
            if feature.deadline is not None:
                first = earliest(first, feature.deadline)
        return first

    @property
    def is_fully_idle(self) -> bool:
        """True when nothing is in flight, no request owns memory, and nothing waits; see ``Books``."""
        return self.books.is_fully_idle

    def refusal_of(
        self,
        message: Generate,
        *,
        queued: int = 0,
        taken: frozenset[str] = frozenset(),
        freed: frozenset[str] = frozenset(),
    ) -> Refusal | None:
        """Return why this request would be refused; None if it would be admitted. Changes nothing.

        ``queued`` requests with the rids ``taken`` are on their way into the queue before it; requests with the rids
        ``freed`` are on their way out of the engine.
        """
        refusal = self._admission.refusal_of(message, self.failure, queued=queued, taken=taken, freed=freed)
        if refusal is not None and message.rid in self.books.requests:
            return msgspec.structs.replace(refusal, behind=1)
        return refusal

    def find_request(self, rid: str) -> Request | None:
        """Return the live request of this rid, or None."""
        return self.books.requests.get(rid)

    def stats(self) -> EngineStats:
        """Return the current statistics."""
        return stats_of(self)

    @property
    def is_at_rest(self) -> bool:
        """True when no call is open, no profile runs, no LoRA is being loaded or dropped, and the stages are awake."""
        return all(feature.is_at_rest for feature in self.features)

    # -- completions --

    def _on_completion(self, completion: Completion) -> None:
        if self.failure is not None:
            return  # The microbatch was dropped when the pipeline failed.
        in_flight = self.books.in_flight
        if not in_flight or completion.microbatch_id != in_flight[0].microbatch.id:
            raise IntegrityError(
                f"microbatch {completion.microbatch_id} came back, but {self.books.in_flight_ids()} are in flight"
            )
        launched = self._land(failed=completion.error is not None)
        if launched.microbatch.is_control:
            self._owners[type(launched.microbatch)].finish(completion.error)
        elif completion.error is not None:
            for request in launched.requests:
                request.in_flight -= 1
                self._on_failed_segment(request, completion.error)
        else:
            self._on_results(launched, completion)

    def _land(self, *, failed: bool) -> Launched:
        """Take the oldest microbatch out of flight."""
        launched = self.books.land()
        for feature in self.hooks.land:
            feature.land(launched, failed=failed)
        return launched

    def _on_results(self, launched: Launched, completion: Completion) -> None:
        tokens, logprobs, used = completion.token_ids, completion.logprobs, 0
        accepted = iter(completion.accepted)
        hooks = self.hooks
        if launched.microbatch.mode is not DECODE:
            for feature in hooks.take_prompts:
                feature.take_prompts(launched, completion)
        for feature in hooks.take_result:
            feature.take_result(launched, completion)
        for failed in completion.errors:
            for request in launched.requests:
                if request.rid == failed.rid and not request.is_finished:
                    # Ended while it is in flight, so that its prompt logprobs are dropped with its result.
                    self.end(request, failed.reason, error=failed.error)
        for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True):
            request.in_flight -= 1
            if not segment.emits:
                self._on_chunk(request, segment.start + len(segment.token_ids))
                continue
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
        for feature in hooks.after_result:
            feature.after_result(launched)

    def _on_verified(
        self, request: Request, segment: Segment, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None]
    ) -> None:
        """Take the result of a decode with drafts: the correct guesses, and one more token."""
        if not 1 <= len(tokens) <= 1 + segment.drafts:
            raise IntegrityError(f"{len(tokens)} tokens came back for {request}, which had {segment.drafts} drafts")
        for feature in self.hooks.verify:
            feature.verify(request, segment.drafts, len(tokens) - 1)
        for place, token in enumerate(tokens):
            if not request.is_finished:
                self._take_token(request, token, logprobs[place] if logprobs else None)
        self.release_if_landed(request)

    def _on_failed_segment(self, request: Request, error: str) -> None:
        if request.is_finished:
            self.release_if_landed(request)
        else:
            self.end(request, FinishReason.ERROR, error=error)

    def _on_chunk(self, request: Request, confirmed_tokens: int) -> None:
        """Take the result of a chunk that is not the last: confirmed KV up to its end, but no token."""
        assert request.lease is not None, f"{request} owned no memory while it was in flight"
        self.memory.tree.check_own(request.lease.node)
        if request.place is CHUNKED and not request.in_flight:
            self.memory.publish(request.lease, request.ids[: request.planned_tokens], counts=False)
        # After publishing, because the cache's pages replace the request's own.
        for feature in self.hooks.confirm:
            feature.confirm(request, confirmed_tokens)
        if request.is_prefilled and not (request.in_flight or request.is_finished):
            self.end_prefilled(request)
            return
        self.release_if_landed(request)

    def _on_token(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        """Take the result of a last chunk or of a decode: one token, unless the request ended in the meantime."""
        if not request.is_finished:
            self._take_token(request, token, logprob)
        self.release_if_landed(request)

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
            self.end(request, reason, token=token, logprob=logprob)
        else:
            self._replies.append(output_of(request, token=token, logprob=logprob))

    def _why_finished(self, request: Request, token: int) -> FinishReason | None:
        if token in request.stop_ids:
            return STOP
        return LENGTH if len(request.ids) >= request.limit_tokens else None

    def _on_pipeline_failed(self, failed: PipelineFailed) -> None:
        """End every request with an error that names the dead process: nothing in flight will come back."""
        self.failure = self.failure or failed
        while self.books.in_flight:
            for request in self._land(failed=True).requests:
                request.in_flight = 0
        for feature in self.hooks.lose_pipeline:
            feature.lose_pipeline()
        for request in list(self.books.releasing):
            self.release_if_landed(request)
        for request in list(self.books.requests.values()):
            self.end(request, FinishReason.ERROR, error=str(failed))

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
        for feature in self.hooks.enter:
            feature.enter(request, message)
        self.books.enqueue(request)

    def _on_abort(self, abort: Abort) -> None:
        request = self.books.requests.get(abort.rid)
        if request is not None:
            self.end(request, abort.finish_reason)
        if abort.call_id is not None:
            state = "aborted" if request is not None else "not alive, nothing to abort"
            self.answer(abort.call_id, ok=True, message=f"{abort.rid}: {state}")

    def _on_abort_all(self, abort: AbortAll) -> None:
        ended = self.end_all()
        if abort.call_id is not None:
            self.answer(abort.call_id, ok=True, message=f"aborted {ended} requests")

    # -- operators' calls --

    def _on_pause(self, pause: PauseGeneration) -> None:
        self.books.paused = pause.mode
        self.stop_requests(pause.mode)
        self.answer(pause.call_id, ok=True, message=f"paused ({pause.mode}): {self.books.what_is_busy()}")

    def _on_continue(self, message: ContinueGeneration) -> None:
        self.books.paused = None
        self.answer(message.call_id, ok=True, message="continued")

    def _on_get_stats(self, message: GetStats) -> None:
        self._replies.append(StatsAnswer(call_id=message.call_id, stats=self.stats()))

    # -- launching --

    def _launch(self) -> Microbatch | None:
        hooks = self.hooks
        if self.failure is not None:
            for feature in hooks.give_up:
                feature.give_up(str(self.failure))
            return None
        for feature in hooks.launch:
            if feature.is_due:
                control = feature.launch(self.counters.forward_ct)
                if control is not None:
                    return self._book(control, ())
                break
        plan = self.planner.plan()
        if plan is None:
            return None
        self.planner.check_budget(plan)
        copies: Copies | None = None
        for feature in hooks.copies:
            copies = feature.copies()
        forward = Forward(self.counters.forward_ct, plan.mode, tuple(plan.segments), copies)
        return self._book(forward, tuple(plan.requests))

    def _book(self, microbatch: Microbatch, requests: tuple[Request, ...]) -> Microbatch:
        self.counters.forward_ct += 1
        self.books.launch(Launched(microbatch, requests, self.step_number, self.now))
        self.last_microbatch = microbatch
        return microbatch
