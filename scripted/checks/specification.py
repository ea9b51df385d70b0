"""The executable specification: what the engine promises to do in each step, as plainly as it can be written.

A second scheduler, obvious instead of fast. It shares only messages, plan structs and limits with the first; it keeps
lists, and counts anew what can be counted. Names in bold are the rules of docs/architecture.md, "The rules of a step":
read both side by side. The page also says what is not specified.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from engine import messages
from engine.limits import Limits
from engine.messages import FinishReason, PauseMode, RefusalKind, TokenLogprob
from engine.plan import ForwardMode
from scripted.checks.expected import Expected, ExpectedSegment
from scripted.checks.specified_drafts import drafts_of, verify
from scripted.checks.specified_grammars import SpecifiedGrammars
from scripted.checks.specified_memory import SpecifiedMemory
from scripted.checks.specified_queue import by_policy, gives_way, is_overdue, overtake
from scripted.checks.specified_request import SpecifiedRequest as Request

__all__ = ["Specification"]

TRIES_LIMIT: Final = 16
TOTALS: Final = messages.EngineStats.__struct_fields__[
    messages.EngineStats.__struct_fields__.index("requests_started") : -1
]

_Part = tuple[Request, int, int]  # a request, its first token in a microbatch, and the first that is not in it
_Flight = tuple[list[tuple[Request, bool]], int, ForwardMode]  # in flight: requests, each with whether it emits a token


class Specification:
    """Made for a new or reset engine. ``step`` takes what a step of the engine takes."""

    def __init__(self, limits: Limits) -> None:
        self.limits, self.memory = limits, SpecifiedMemory(limits)
        self.grammars = SpecifiedGrammars(limits.max_cached_grammars)
        self.live: dict[str, Request] = {}  # what has not ended, in order of arrival
        self.running: list[Request] = []  # what decodes, launched longest ago first
        self.chunked: Request | None = None
        self.flights: list[_Flight] = []
        self.paused: PauseMode | None = None
        self.failure: str | None = None
        self.deferred: messages.FlushCache | messages.UpdateWeights | None = None
        self.deadline: float | None = None
        self.update: messages.UpdateWeights | None = None
        self.now, self.replies = 0.0, list[messages.Reply]()
        self.steps = self.launched = 0
        self.totals = dict.fromkeys(TOTALS, 0)

    def step(self, events: Iterable[messages.Event], now: float) -> Expected:
        """**Step**: the events in their order, then the call that waits, then at most one microbatch."""
        self.steps, self.now, self.replies = self.steps + 1, now, []
        for event in events:
            self._apply(event)
        if self.deferred is not None and (self.is_quiescent or now >= (self.deadline or 0.0)):
            call, self.deferred, self.deadline = self.deferred, None, None
            self._do(call) if self.is_quiescent else self._answer(call, ok=False, says=self._busy_counts())
        retractions = self.totals["retractions"]
        mode, plan, weights = self._launch()
        segments = [self._segment(*part) for part in plan]
        if mode is not None:
            parts = [(request, end == len(request.ids)) for request, _, end in plan]
            self.flights.append((parts, self.launched, mode))
            self.launched += 1
        again = (mode is not None or self.totals["retractions"] != retractions) and self._may_plan()
        orders = self.grammars.take_orders()
        return Expected(mode, self.launched - 1, segments, weights, self.replies, self.deadline, again, orders)

    def _apply(self, event: messages.Event) -> None:
        match event:
            case messages.Completion():
                self._on_completion(event)
            case messages.PipelineFailed():
                self._on_pipeline_failed(str(event))
            case messages.GrammarReady():
                for request in self.grammars.answer(event, self.totals):
                    self._end(request, FinishReason.ERROR, error=event.error)
            case messages.Generate():
                self._on_generate(event)
            case messages.Abort():
                alive = self.live.get(event.rid)
                if alive is not None:
                    self._end(alive, event.finish_reason)
                self._answer(event, ok=True, says=f"{event.rid}: {'aborted' if alive else 'not alive'}")
            case messages.AbortAll():
                self._answer(event, ok=True, says=f"aborted {self._abort_all()} requests")
            case messages.FlushCache() | messages.UpdateWeights():
                self._on_quiescent_call(event)
            case messages.PauseGeneration():
                self._on_pause(event.mode)
                self._answer(event, ok=True, says=self._busy_counts())
            case messages.ContinueGeneration():
                self.paused = None
                self._answer(event, ok=True)
            case messages.GetStats():
                self.replies.append(messages.StatsAnswer(call_id=event.call_id, stats=self.stats()))
            case messages.SetPressure() | messages.ReleasePressure() | messages.EvictCache():
                self.memory.press(event)

    # -- what is where, counted anew --

    @property
    def waiting(self) -> list[Request]:
        """**Queue**: in order of arrival; what was sent back has its old place."""
        return [request for request in self.live.values() if not request.owns_memory]

    @property
    def is_quiescent(self) -> bool:
        """**Quiescent**: nothing is in flight and no request owns memory."""
        return not (self.memory.owners or self.flights or self.update)

    def _busy_counts(self) -> str:
        leaving = sum([request.is_leaving or request.end is not None for request in self.memory.owners])
        return (
            f"waiting={len(self.waiting)} chunked={int(self.chunked is not None)} running={len(self.running)} "
            f"in_flight={len(self.flights) or int(self.update is not None)} releasing={leaving}"
        )

    def _ready(self) -> list[Request]:
        return [request for request in self.running if not request.in_flight]

    def stats(self) -> messages.EngineStats:
        """**Counters**: sizes as they are now, totals since the engine was new."""
        return messages.EngineStats(
            step=self.steps, forward_ct=self.launched, waiting=len(self.waiting), running=len(self.running),
            chunked=int(self.chunked is not None), in_flight=len(self.flights), paused=self.paused,
            waiting_for_grammar=self.grammars.waiting(), **self.memory.sizes(), **self.totals,
        )  # fmt: skip

    # -- results --

    def _on_completion(self, completion: messages.Completion) -> None:
        """**Result**: for each request of the microbatch, in its order; with an error, all of them end."""
        if not self.flights or completion.microbatch_id < self.flights[0][1]:
            return  # It was in flight when the pipeline failed.
        (parts, _, mode), error = self.flights.pop(0), completion.error
        accepted, guesses = iter(completion.accepted), iter(completion.guesses)
        if mode is ForwardMode.UPDATE:
            self._finish_update(error)
        tokens, logprobs = iter(completion.token_ids), iter(completion.logprobs)
        for failed, why in ((one, why) for rid, why in completion.errors for one, _ in parts if one.rid == rid):
            if failed.end is None:
                self._end(failed, FinishReason.ERROR, error=why)
        for request, emits in parts:
            request.in_flight -= 1
            count = 0
            if emits and error is None:
                count = 1 + verify(request, self, next(accepted) if request.drafts else 0)
                request.guesses = next(guesses, ())
            for token, logprob in [(next(tokens), next(logprobs, None)) for _ in range(count)]:
                if request.end is None:
                    self._take_token(request, token, logprob)
            if request.end is None:
                if error is not None:
                    self._end(request, FinishReason.ERROR, error=error)
                elif request is self.chunked and not request.in_flight:
                    self.memory.publish(request, request.planned_tokens)
            self._leave_if_landed(request)

    def _take_token(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        if not (request.is_running or request.is_leaving):
            self.memory.publish(request, len(request.ids))
            request.is_running = True
            self.running.append(request)
        request.ids.append(token)
        self.totals["generated_tokens"] += 1
        if token in request.stop_ids:
            self._end(request, FinishReason.STOP, token, logprob)
        elif len(request.ids) >= request.limit_tokens:
            self._end(request, FinishReason.LENGTH, token, logprob)
        else:
            self.replies.append(request.output(token, logprob))

    def _end(self, request: Request, reason: FinishReason, *news: Any, error: str | None = None) -> None:
        """**End**: one terminal reply; the memory is free as soon as nothing with the request is in flight."""
        request.end = reason
        self._take_out(request)
        del self.live[request.rid]
        self.replies.append(request.output(*news, error=error))
        self.totals["requests_aborted" if reason is FinishReason.ABORT else "requests_finished"] += 1
        if news:
            self.memory.publish(request, len(request.ids) - 1)
        self.grammars.leave(request)
        self._leave_if_landed(request)

    def _abort_all(self) -> int:
        live = [*self.live.values()]
        for request in live:
            self._end(request, FinishReason.ABORT)
        return len(live)

    def _take_out(self, request: Request) -> None:
        request.is_running, self.chunked = False, None if self.chunked is request else self.chunked
        self.running = [other for other in self.running if other is not request]

    def _retract(self, request: Request) -> None:
        """**Retract**: its memory is free as soon as nothing with it is in flight; it keeps its place in the queue."""
        self._take_out(request)
        request.is_leaving = True
        self._leave_if_landed(request)

    def _leave_if_landed(self, request: Request) -> None:
        if request.in_flight or not request.owns_memory or not (request.is_leaving or request.end is not None):
            return
        if request.end is None:
            self.totals["retractions"] += 1
            request.was_retracted, request.guesses = True, ()
        request.owns_memory = request.is_leaving = False
        self.memory.release(request)
        self.grammars.leave(request)

    def _on_pipeline_failed(self, why: str) -> None:
        """**Death**: nothing in flight comes back, and every request ends with an error."""
        self.failure, self.flights = self.failure or why, []
        for request in [*self.memory.owners]:
            request.in_flight = 0
            if request.end is not None:
                self._leave_if_landed(request)
        for request in [*self.live.values()]:
            self._end(request, FinishReason.ERROR, error=why)

    # -- clients --

    def _on_generate(self, message: messages.Generate) -> None:
        refusal = self._refusal_of(message)
        if refusal is None:
            self.totals["requests_started"] += 1
            self.totals["prompt_tokens"] += len(message.prompt_ids)
            request = self.live[message.rid] = Request(message, self.totals["requests_started"], self.limits)
            self.grammars.begin(request, self.totals)
        else:
            self.totals["requests_refused"] += 1
            self.replies.append(messages.Refusal(rid=message.rid, kind=refusal[0], message=refusal[1]))

    def _refusal_of(self, message: messages.Generate) -> tuple[RefusalKind, str] | None:
        """**Refuse**: for the first of these reasons that holds."""
        never = self.limits.why_never_fits(len(message.prompt_ids), max(1, message.sampling.max_new_tokens))
        waiting = len(self.waiting)
        if self.failure is not None:
            return RefusalKind.UNAVAILABLE, self.failure
        if never is not None:
            return RefusalKind.INVALID, never
        if message.rid in self.live:
            return RefusalKind.DUPLICATE, repr(message.rid)
        return (RefusalKind.BUSY, f"{waiting} requests wait") if waiting >= self.limits.max_queued_requests else None

    def _answer(self, call: Any, *, ok: bool, says: str = "") -> None:
        if call.call_id is not None:
            self.replies.append(messages.CallAnswer(call_id=call.call_id, ok=ok, message=says))

    def _on_pause(self, mode: PauseMode) -> None:
        self.paused = mode
        if mode is PauseMode.ABORT:
            self._abort_all()
        elif mode is PauseMode.RETRACT:
            for request in [one for one in self.memory.owners if one.end is None and not one.is_leaving]:
                self._retract(request)

    def _on_quiescent_call(self, call: messages.FlushCache | messages.UpdateWeights) -> None:
        """**Deferred**: at once, or refused, or as soon as the engine is quiescent; one at a time."""
        if self.is_quiescent:
            self._do(call)
        elif call.timeout_s is None or self.deferred is not None:
            self._answer(call, ok=False, says=self._busy_counts() if call.timeout_s is None else "")
        else:
            self.deferred, self.deadline = call, self.now + call.timeout_s

    def _do(self, call: messages.FlushCache | messages.UpdateWeights) -> None:
        if isinstance(call, messages.UpdateWeights):
            self.update = call
        else:
            self.grammars.shrink(0)
            self._answer(call, ok=True, says=f"flushed {self.memory.flush()} cached pages")

    def _finish_update(self, error: str | None) -> None:
        call, self.update = self.update, None
        self.totals["weights_version"] += error is None
        done = f"flushed {self.memory.flush()} cached pages" if error is None else ""
        self._answer(call, ok=error is None, says=error or done)

    # -- launching --

    def _may_plan(self) -> bool:
        is_free = self.paused is None and self.update is None and len(self.flights) < self.limits.depth
        return is_free and bool(self.chunked is not None or self._ready() or self.waiting)

    def _launch(self) -> tuple[ForwardMode | None, list[_Part], str | None]:
        """**Launch**: an update of the weights by itself, or prompts, or decodes."""
        if self.update is not None and self.failure is not None:
            self._finish_update(self.failure)
        elif self.update is not None and not self.flights:
            return ForwardMode.UPDATE, [], self.update.model_path
        elif self.failure is None and self._may_plan():
            prompts, decodes = self._plan()
            if prompts or decodes:
                mode = ForwardMode.PREFILL if not decodes else ForwardMode.MIXED if prompts else ForwardMode.DECODE
                return mode, [*prompts, *decodes], None
        return None, [], None

    def _segment(self, request: Request, start: int, end: int) -> ExpectedSegment:
        """**Told**: what the stages do not know yet of a request's pages; of its sampling, with its first part."""
        told, request.told_pages = request.told_pages, request.pages
        sampling = request.sampling() if start == request.hit_tokens else None
        ids, emits, drafts = tuple(request.ids[start:end]), end == len(request.ids), request.drafts
        return ExpectedSegment(
            request.rid, start, ids + drafts, told, request.pages - told, emits, sampling, len(drafts)
        )

    def _plan(self) -> tuple[list[_Part], list[_Part]]:
        """**Mixed**: decodes first and prompts into the rest; without mixing, decodes when there are no prompts."""
        budget, limits = self.limits.prefill_budget_tokens, self.limits
        if not limits.mixed_chunk:
            prompts = self._prompts(budget)
            return prompts, [] if prompts else self._decodes(limits.rows, with_drafts=True)
        left_to_prompts = max(1, min(limits.page_size, budget // 2)) if limits.chunking else budget
        has_prompts = self.chunked is not None or bool(self.waiting)
        count = len(self._choose(budget - left_to_prompts)) if has_prompts else 0
        prompts = self._prompts(budget - count)
        taken = sum([end - start for _, start, end in prompts])
        most = budget - taken if prompts else limits.rows
        return prompts, self._decodes(most, with_drafts=not prompts)

    def _prompts(self, budget: int) -> list[_Part]:
        """**Start**: the next part of the prompt that is split, then requests of the queue while the budget lasts."""
        plan: list[_Part] = []
        tries, queue = 0, by_policy(self.grammars.startable(self.waiting), self.limits, self.memory)
        for request in queue if self.chunked is None else [self.chunked, *queue]:
            overtaken: list[Request] = []
            if not request.owns_memory:
                has_row = self.memory.free_rows or (self.limits.priority_preemption and self._lower_than(request))
                if self.chunked is not None or not has_row or not self._is_worth(budget, request, alone=not plan):
                    break
                if not self._admit(request):
                    tries += 1
                    if tries >= TRIES_LIMIT or is_overdue(request):
                        break
                    continue
                overtaken = overtake(request, self.grammars.startable(self.waiting), self.limits)
            start = request.planned_tokens
            end = min(start + budget, request.goal_tokens)
            if not self.memory.extend(request, end):
                break
            request.planned_tokens, request.in_flight = end, request.in_flight + 1
            self.chunked = None if end == request.goal_tokens else request
            budget -= end - start
            plan.append((request, start, end))
            if any(map(is_overdue, overtaken)):
                break
        return plan

    def _is_worth(self, budget: int, request: Request, *, alone: bool) -> bool:
        """**Sliver**: beside other prompts, a whole prompt or a part of at least one page."""
        if alone or len(request.ids) <= budget:
            return budget > 0
        may_split = self.limits.chunking or len(request.ids) > self.limits.prefill_budget_tokens
        return may_split and budget >= self.limits.page_size

    def _admit(self, request: Request) -> bool:
        """**Room**: for all of its tokens, and a page for each request that runs; beside what it hits."""
        memory = self.memory
        if self.limits.priority_preemption:
            self._preempt_for(request)
        if not memory.free_rows:
            return False
        hit = memory.match(request.ids)
        memory.use(hit)
        if memory.pages_for(len(request.ids)) - len(hit) + len(self.running) > memory.available_pages(
            memory.owners, hit
        ):
            return False
        memory.owners.append(request)
        request.owns_memory, request.prefix, request.pages, request.told_pages = True, hit, len(hit), 0
        request.hit_tokens = request.planned_tokens = len(hit) * self.limits.page_size
        request.goal_tokens = len(request.ids)
        if not request.was_retracted:
            request.cached_tokens = request.hit_tokens
            self.totals["cached_tokens"] += request.hit_tokens
        return True

    def _choose(self, most: int) -> list[Request]:
        """**Turns**: launched longest ago first, no more than a stage's share of all that run."""
        most = min(most, -(-len(self.running) // self.limits.pp_size))
        chosen: list[Request] = []
        for request in self._ready():
            if len(chosen) < most and request.is_running and self._make_room(request, chosen):
                chosen.append(request)
        return chosen

    def _decodes(self, most: int, *, with_drafts: bool) -> list[_Part]:
        chosen = self._choose(most)
        for request in chosen:
            request.drafts = drafts_of(request, self) if with_drafts else ()
            request.planned_tokens, request.in_flight = len(request.ids) + len(request.drafts), 1
            self.memory.extend(request, request.planned_tokens)
        self.running = [request for request in self.running if request not in chosen] + chosen
        return [(request, len(request.ids) - 1, len(request.ids)) for request in chosen]

    def _make_room(self, request: Request, chosen: list[Request]) -> bool:
        """**Victim**: while a decode has no page for its next token one gives way, if need be itself."""
        while not self.memory.extend(request, request.planned_tokens + 1):
            victim = max(self._ready(), key=gives_way)
            chosen[:] = [one for one in chosen if one is not victim]
            self._retract(victim)
            if victim is request:
                return False
        return True

    def _lower_than(self, request: Request) -> list[Request]:
        return [one for one in self._ready() if one.priority < request.priority]

    def _preempt_for(self, request: Request) -> None:
        """**Preempt**: as many of lower priority as it takes, or none if all of them are not enough."""
        memory, victims = self.memory, self._lower_than(request)
        need = memory.pages_for(len(request.ids)) + len(self.running)
        if need > memory.available_pages([owner for owner in memory.owners if owner not in victims]):
            return
        while victims and not (memory.free_rows and need <= memory.available_pages(memory.owners)):
            victim = max(victims, key=gives_way)
            victims.remove(victim)
            self._retract(victim)
