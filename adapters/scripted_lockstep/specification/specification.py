"""The executable specification: the engine's promises for each step, written as plainly as possible.

A second scheduler, obvious instead of fast. It shares only messages, plan structs and limits with the first; it keeps
lists, and recounts instead of counting. Names in bold are the rules of docs/rules.md: read both side by side. The page
also says what is not specified.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import Any, Final

from engine.core import messages
from engine.core.limits import Limits
from engine.core.messages import FinishReason, PauseMode, TokenLogprob
from engine.core.plan import UNKNOWN_TOKEN, ForwardMode
from engine.core.stats import EngineStats
from scripted_lockstep.specification.calls import Answer, SpecifiedCalls
from scripted_lockstep.specification.drafts import verify
from scripted_lockstep.specification.expected import Expected, ExpectedSegment, mode_of
from scripted_lockstep.specification.gap import SpecifiedGap
from scripted_lockstep.specification.grammars import SpecifiedGrammars
from scripted_lockstep.specification.loras import SpecifiedLoras
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.plan import Part, plan_of
from scripted_lockstep.specification.queue import next_deadline, out_of_time, why_refused
from scripted_lockstep.specification.request import SpecifiedRequest as Request
from scripted_lockstep.specification.transfers import SpecifiedTransfers

ENDS: Final = {FinishReason.ABORT: "requests_aborted", FinishReason.TIMEOUT: "requests_timed_out"}
FIELDS: Final = EngineStats.__struct_fields__
TOTALS: Final = FIELDS[FIELDS.index("requests_started") : -1]

_Flight = tuple[list[Part], list[ExpectedSegment], ForwardMode]


class Specification:
    """Computes the required output of a new or reset engine, step by step."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.memory = limits, SpecifiedMemory(limits)
        self.grammars = SpecifiedGrammars(limits.max_cached_grammars)
        self.totals = dict.fromkeys(TOTALS, 0)
        self.calls = SpecifiedCalls(self.memory, self.grammars, self.totals)
        self.requests: list[Request] = []  # all accepted requests, in order of arrival
        self.live: dict[str, Request] = {}  # requests that have not ended
        self.running: list[Request] = []  # decoding requests, launched longest ago first
        self.chunked: Request | None = None
        self.flights: list[_Flight] = []
        self.paused: PauseMode | None = None
        self.failure: str | None = None
        self.now, self.replies = 0.0, list[messages.Reply]()
        self.steps, self.launched, self.has_time_limits = 0, 0, limits.waiting_timeout_s is not None
        self.loras = SpecifiedLoras(limits, self.totals)
        self.transfers = SpecifiedTransfers(limits, self.memory)
        self.gap = SpecifiedGap(limits)

    def step(self, events: Iterable[messages.Event], now: float) -> Expected:
        """**Step**: the events, then requests that time out, then the waiting call, then at most one microbatch."""
        self.steps, self.now, self.replies = self.steps + 1, now, []
        for event in events:
            self._apply(event)
        timed = self.live.values() if self.has_time_limits else ()
        for _, _, says, request in out_of_time(timed, self.limits, now) if timed else ():
            self._end(request, FinishReason.TIMEOUT, error=says)
        if self.transfers.open:
            self.transfers.fail_overdue(now)
        if self.calls.deadline is not None:
            self._answer_all(self.calls.due(now, self._busy()))
        if self.loras.unload is not None:
            self._answer_all(self.loras.check_unload([*self.live.values(), *self.memory.owners], now))
        retractions, (mode, plan, order) = self.totals["retractions"], self._launch()
        segments = [self._segment(*part) for part in plan]
        copies = self.memory.launch_copies(self.launched, self.totals) if segments else (0, 0)
        if mode is not None:
            self.flights.append((plan, segments, mode))
            self.gap.launch(now)
            self.launched += 1
        ordered, asked = self.transfers.take_outgoing()
        self.replies += asked
        changed = bool(mode is not None or self.totals["retractions"] != retractions or ordered or asked)
        changed |= self.loras.is_postponed
        change = self.loras.flight.says if self.loras.flight and mode is ForwardMode.LORA else None
        waits = self.calls.deadline, self.loras.deadline, self.transfers.deadline
        deadline = next_deadline(waits, timed, self.limits)
        again = changed and (self._may_plan() or (self._has_slot() and self.loras.is_call_due))
        orders = self.grammars.take_orders()
        more = deadline, again, orders, copies, ordered, self.loras.take_orders()
        return Expected(mode, self.launched - 1, segments, order, change, self.replies, *more)

    def _apply(self, event: messages.Event) -> None:
        match event:
            case messages.Completion():
                self._on_completion(event)
            case messages.PipelineFailed():
                self._on_pipeline_failed(str(event))
            case messages.GrammarReady():
                for request in self.grammars.answer(event, self.totals):
                    self._end(request, event.reason, error=event.error)
            case messages.LoraRead():
                self._end_change(event.error, *self.loras.read(event, self.waiting))
            case messages.PagesReceived() | messages.PagesSent():
                self._on_transfer(event)
            case messages.PrefillFailed():
                self.transfers.fail(event.transfer)
            case messages.Generate():
                self._on_generate(event)
            case messages.Abort():
                self._on_abort(event)
            case messages.AbortAll():
                self._answer(event, ok=True, says=f"aborted {self._abort_all()} requests")
            case messages.FlushCache() | messages.UpdateWeights() | messages.StartProfile() | messages.StopProfile():
                self._answer_all(self.calls.ask(event, self.now, self._busy()))
            case messages.Sleep() | messages.Wake():
                if isinstance(event, messages.Sleep):
                    self._stop_requests(event.mode)
                self._answer_all(self.calls.ask(event, self.now, ""))
            case messages.PauseGeneration():
                self.paused = event.mode
                self._stop_requests(event.mode)
                self._answer(event, ok=True, says=self._busy_counts())
            case messages.ContinueGeneration():
                self.paused = None
                self._answer(event, ok=True)
            case messages.GetStats():
                self.replies.append(messages.StatsAnswer(call_id=event.call_id, stats=self.stats()))
            case messages.LoadLora() | messages.UnloadLora():
                self._answer_all(self.loras.ask(event, [*self.live.values(), *self.memory.owners], self.now))
            case messages.SetPressure() | messages.ReleasePressure() | messages.EvictCache():
                self.memory.press(event)

    def _on_abort(self, event: messages.Abort) -> None:
        alive = self.live.get(event.rid)
        if alive is not None:
            self._end(alive, event.finish_reason)
        self._answer(event, ok=True, says=f"{event.rid}: {'aborted' if alive else 'not alive'}")

    # -- the state, recounted --

    @property
    def waiting(self) -> list[Request]:
        """**Queue**: in order of arrival; a retracted request has its old place."""
        return [request for request in self.live.values() if not request.owns_memory]

    @property
    def is_quiescent(self) -> bool:
        """**Quiescent**: nothing is in flight and no request owns memory."""
        return not (self.memory.owners or self.flights or self.calls.update or self.calls.sleep_calls)

    def _busy(self) -> str:
        return "" if self.is_quiescent else self._busy_counts()

    def _busy_counts(self) -> str:
        leaving = sum([request.is_leaving or request.end is not None for request in self.memory.owners])
        return (
            f"waiting={len(self.waiting)} chunked={int(self.chunked is not None)} running={len(self.running)} "
            f"in_flight={len(self.flights) or int(bool(self.calls.update or self.calls.sleep_calls))} "
            f"releasing={leaving}" + (f" transferring={len(moving)}" if (moving := self.transfers.transferring) else "")
        )

    def ready(self) -> list[Request]:
        """Return the decodes that are in no microbatch, least recently launched first."""
        return [request for request in self.running if not request.in_flight]

    def ahead(self) -> list[Request]:
        """**Ahead**: the decodes in one microbatch; none while a waiting request could preempt them."""
        if not self.limits.async_scheduling or (self.limits.priority_preemption and self.waiting):
            return []
        return [request for request in self.running if request.may_go_ahead]

    def stats(self) -> EngineStats:
        """**Counters**: sizes as they are now, totals since the engine was new."""
        waiting = self.waiting
        return EngineStats(
            step=self.steps, forward_ct=self.launched, waiting=len(waiting), chunked=int(self.chunked is not None),
            running=len(self.running), in_flight=len(self.flights), paused=self.paused, alive=len(self.live),
            sleep_level=self.calls.sleep_level,
            pending_prefill_tokens=self.pending_tokens(), **self.memory.sizes(),
            waiting_for_grammar=self.grammars.waiting(), loras_resident=len(self.loras.resident),
            open_transfers=len(self.transfers.open), **self.totals,
        )  # fmt: skip

    def pending_tokens(self) -> int:
        """**Load**: count the tokens to compute, of receiving requests only those that they do not receive."""
        pending = self.memory.pending_tokens(self.waiting, self.chunked)
        return pending + sum([one.goal_tokens - one.planned_tokens for one in self.transfers.transferring])

    # -- results --

    def _on_completion(self, completion: messages.Completion) -> None:
        """**Result**: apply it to each request of the microbatch, in order; after an error all of them end."""
        if self.failure is not None:
            return  # It was in flight when the pipeline failed.
        (plan, segments, mode), error = self.flights.pop(0), completion.error
        self.gap.land(self.now, mode, segments, failed=error is not None)
        self.memory.land_copies(completion.microbatch_id, failed=error is not None)
        if completion.prompt_logprobs:
            self.replies += Request.prompt_logprob_outputs(plan, segments, completion, self.totals["weights_version"])
        for failed in completion.errors:
            for request in [one for one, *_ in plan if one.rid == failed.rid and one.end is None]:
                self._end(request, failed.reason, error=failed.error)
        tokens, logprobs = iter(completion.token_ids), iter(completion.logprobs)
        accepted, guesses = iter(completion.accepted), iter(completion.guesses)
        computed: list[Part] = []
        for (request, start, end), segment in zip(plan, segments, strict=True):
            request.in_flight -= 1
            count = int(segment.emits and error is None)
            if count and self.limits.draft_tokens:
                count = verify(request, self, accepted, guesses)
            if self.memory.window is not None and error is None:
                computed.append((request, start, end + max(0, count - 1)))
            for _ in range(count):
                token, logprob = next(tokens), next(logprobs, None)
                if request.end is None:
                    self._take_token(request, token, logprob)
            if request.end is None:
                if error is not None:
                    self._end(request, FinishReason.ERROR, error=error)
                else:
                    if request is self.chunked and not request.in_flight:
                        self.memory.publish(request, request.planned_tokens, counts=False)
                    self.transfers.send(request, end)
                    self._end_if_prefilled(request)
            self._leave_if_landed(request)
        for request, _, end in computed:
            self.memory.slide(request, end)
        if not plan:
            self._on_control_completion(mode, error)

    def _on_control_completion(self, mode: ForwardMode, error: str | None) -> None:
        """**Changes**, **Weight update**, **Sleep**, **Profile**: the result of a microbatch without tokens."""
        if mode is not ForwardMode.LORA:
            self._answer_all(self.calls.finish(mode, error))
            self._end_outdated()
            return
        self._end_change(error, *self.loras.land(error, self.launched, self.waiting))

    def _end_change(self, error: str | None, answers: Iterable[Answer], left: Iterable[Request]) -> None:
        """**Changes**: answer the call of a change, and end the requests whose LoRA could not be loaded."""
        self._answer_all(answers)
        for request in left:
            self._end(request, FinishReason.UNAVAILABLE, error=error)

    def _end_outdated(self) -> None:
        """**Send**: end the waiting requests whose KV was wanted with weights that the engine no longer has."""
        weights = self.calls.weights[-1] or ""
        for request in self.waiting:
            deliver = request.message.deliver
            if deliver is not None and deliver.weights != weights:
                wanted = deliver.weights or "of the start"
                why = f"its KV was wanted with the weights {wanted!r}, which an update has replaced; ask again"
                self._end(request, FinishReason.UNAVAILABLE, error=why)

    def _end_if_prefilled(self, request: Request) -> None:
        """**End**: a request for no tokens ends with its prompt, or once all of the prompt has been sent."""
        if request.is_prefilled and not (request.in_flight or request.end is not None):
            self.memory.publish(request, request.planned_tokens)
            self._end(request, FinishReason.LENGTH)

    def _on_transfer(self, event: messages.PagesReceived | messages.PagesSent) -> None:
        """**Receive**, **Send**: the transfer has ended, and the stages no longer use its pages."""
        is_sent, one = isinstance(event, messages.PagesSent), self.transfers.open.get(event.transfer)
        if one is not None and isinstance(event, messages.PagesReceived):
            self.totals["pages_received"] += event.pages
        if one is not None and isinstance(event, messages.PagesSent) and event.error is None:
            self.totals["pages_sent"] += one.pages
        request = self.transfers.end(event.transfer, None if isinstance(event, messages.PagesSent) else event.pages)
        if request is None:
            return
        if isinstance(event, messages.PagesSent) and event.error is not None and request.end is None:
            self._end(request, FinishReason.ERROR, error=event.error)
        elif is_sent:
            self._end_if_prefilled(request)
        self._leave_if_landed(request)

    def _take_token(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        if not (request.is_running or request.is_leaving):
            self.memory.publish(request, len(request.ids))
            request.is_running = True
            self.running.append(request)
        request.ids.append(token)
        version = self.totals["weights_version"]
        request.versions += () if version in request.versions else (version,)
        self.totals["generated_tokens"] += 1
        if (reason := request.why_ended(token)) is None:
            self.replies.append(request.output(token, logprob))
        else:
            self._end(request, reason, token, logprob)

    def _end(self, request: Request, reason: FinishReason, *news: Any, error: str | None = None) -> None:
        """**End**: one terminal reply; the memory is free as soon as nothing with the request is in flight."""
        request.end = reason
        self._take_out(request)
        del self.live[request.rid]
        self.replies.append(request.output(*news, error=error))
        self.totals[ENDS.get(reason, "requests_finished")] += 1
        request.is_whole = bool(news)
        self.transfers.stop(request)
        if request.owns_memory:
            # Requests that have ended come after all others, in the order of their ends: a death frees them in this
            # order.
            self.memory.owners.remove(request)
            self.memory.owners.append(request)
        self.grammars.leave(request)
        self._leave_if_landed(request)

    def _abort_all(self) -> int:
        live = [*self.live.values()]
        for request in live:
            self._end(request, FinishReason.ABORT)
        return len(live)

    def _take_out(self, request: Request) -> None:
        request.is_running, self.chunked = False, None if self.chunked is request else self.chunked
        request.is_receiving = request.is_delivering = False
        self.running = [other for other in self.running if other is not request]

    def retract(self, request: Request) -> None:
        """**Retract**: its memory is free as soon as nothing with it is in flight; its place in the queue stays."""
        if request.is_receiving:
            self.transfers.stop(request)
        self._take_out(request)
        request.is_leaving = True
        self._leave_if_landed(request)

    def _leave_if_landed(self, request: Request) -> None:
        if request.in_flight or not request.owns_memory or not (request.is_leaving or request.end is not None):
            return
        if request.end is None:
            self.totals["retractions"] += 1
            request.retractions, request.guesses = request.retractions + 1, ()
        if request.is_whole:
            self.memory.publish(request, len(request.ids) - 1)
        request.owns_memory = request.is_leaving = False
        self.memory.release(request)
        self.grammars.leave(request)

    def _on_pipeline_failed(self, why: str) -> None:
        """**Death**: nothing in flight comes back, and every request ends with an error."""
        self.failure, self.flights = self.failure or why, []
        self.memory.land_copies(None, failed=True)
        self.transfers.fail_all()
        for request in [*self.memory.owners]:
            request.in_flight = 0
            if request.end is not None:
                self._leave_if_landed(request)
        for request in [*self.live.values()]:
            self._end(request, FinishReason.ERROR, error=why)

    # -- clients --

    def why_refused(
        self, message: messages.Generate, live: Container[str], waiting: int
    ) -> tuple[messages.RefusalKind, str] | None:
        """**Refuse**: the kind of the refusal and the specified part of its text; None if the request is accepted."""
        return why_refused(
            message, self.failure, live, waiting, self.limits, self.loras.to_ask_for, self.calls.weights[-1]
        )

    def _on_generate(self, message: messages.Generate) -> None:
        refusal = self.why_refused(message, self.live, len(self.waiting))
        if refusal is None:
            self.totals["requests_started"] += 1
            self.totals["prompt_tokens"] += len(message.prompt_ids)
            lora = None if message.lora is None else self.loras.known[message.lora]
            request = Request(message, self.totals["requests_started"], self.limits, self.now, lora)
            self.requests.append(request)
            self.live[message.rid] = request
            self.has_time_limits |= request.has_time_limit
            self.grammars.begin(request, self.totals)
        else:
            self.totals["requests_refused"] += 1
            kind, says = refusal
            behind = int(message.rid in self.live)
            self.replies.append(messages.Refusal(rid=message.rid, kind=kind, message=says, behind=behind))

    def _answer(self, call: Any, *, ok: bool, says: str = "", **more: Any) -> None:
        if call.call_id is not None:
            self.replies.append(messages.CallAnswer(call_id=call.call_id, ok=ok, message=says, **more))

    def _answer_all(self, answers: Iterable[Answer]) -> None:
        for answer in answers:
            self._answer(answer[0], ok=answer[1], says=answer[2], **dict(answer[3:]))

    def _stop_requests(self, mode: PauseMode) -> None:
        if mode is PauseMode.ABORT:
            self._abort_all()
        elif mode is PauseMode.RETRACT:
            for request in [one for one in self.live.values() if one.owns_memory and not one.is_leaving]:
                self.retract(request)

    # -- launching --

    def _has_slot(self) -> bool:
        return self.calls.is_awake and self.calls.update is None and len(self.flights) < self.limits.depth

    def _may_plan(self) -> bool:
        return (
            self.paused is None
            and self._has_slot()
            and bool(self.chunked or self.ready() or self.waiting or self.ahead() or self.transfers.next_received)
        )

    def _launch(self) -> tuple[ForwardMode | None, list[Part], str | int | None]:
        """**Launch**: weights or a sleep with nothing in flight, or a profile, or LoRAs, or prompts, or decodes."""
        if self.failure is not None:
            self._answer_all([*self.calls.fail_all(self.failure), *self.loras.fail_all(self.failure)])
            return None, [], None
        order = self.calls.launch(len(self.flights), self.limits.depth, len(self.transfers.open))
        if self.limits.max_loras:
            has_slot, queue = order is None and self._has_slot(), self.grammars.startable(self.waiting)
            if self.loras.change(queue, self.memory, has_slot=has_slot, goes_on=self.paused is None):
                return ForwardMode.LORA, [], None
        if order is not None:
            return order[0], [], order[1]
        if self._may_plan():
            prompts, decodes = plan_of(self)
            if prompts or decodes:
                return mode_of(prompts, decodes), [*prompts, *decodes], None
        return None, [], None

    def _segment(self, request: Request, start: int, end: int) -> ExpectedSegment:
        """**Told**: the pages that the stages do not know yet, and with the first part the sampling."""
        known, request.known_pages = request.known_pages, request.pages
        sampling = request.sampling() if start == request.hit_tokens else None
        # **Ahead**: a marker replaces the newest token, which is not known yet.
        ids = tuple(request.ids[start:end]) or (UNKNOWN_TOKEN,)
        emits = len(request.ids) <= end < request.limit_tokens
        places = range(known, request.pages) if self.memory.window is not None else ()
        window, drafts = tuple([place >= request.window_start for place in places]), request.drafts
        more = known, request.pages - known, emits, sampling, window, len(drafts), *request.due_logprobs(start, end)
        return ExpectedSegment(request.rid, start, ids + drafts, *more, request.use_lora(self.launched))
