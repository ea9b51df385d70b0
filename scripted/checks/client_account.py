"""What each client was told, and what it must be told: the account of requests, replies and microbatches.

It sees only what crosses the gate (events, plans, replies) and does not rely on what the engine says of itself. This
module checks that each client is told once, in the step whose events call for it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any, ClassVar, Final, NamedTuple

from engine.limits import Limits
from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    EngineStats,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    GetStats,
    GrammarReady,
    LoadAdapter,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    PromptLogprob,
    Refusal,
    RefusalKind,
    Reply,
    StartProfile,
    StopProfile,
    TokenOutput,
    UnloadAdapter,
    UpdateWeights,
)
from engine.plan import ForwardMode, Microbatch, Segment
from engine.scheduler import StepResult
from scripted.checks.adapter_calls import AdapterCalls
from scripted.checks.asked_logprobs import check_asked
from scripted.checks.calls import Calls
from scripted.checks.grammars import GrammarAccount
from scripted.checks.pages import Pages, Tenancy
from scripted.checks.profile_calls import ProfileCalls
from scripted.rig.handle import RequestHandle
from scripted.subject.violation import Violation

__all__ = ["ClientAccount", "Life", "Totals", "check_answers"]

# Constants, because an enum's member costs four times as much to look up, and these are asked for in every step.
_ABORT: Final = FinishReason.ABORT
_COMPLETE: Final = (FinishReason.LENGTH.value, FinishReason.STOP.value)
_TIMEOUT: Final = FinishReason.TIMEOUT
_DECODE: Final = ForwardMode.DECODE
_UPDATE: Final = ForwardMode.UPDATE
_PROFILE: Final = ForwardMode.PROFILE
# What the text of a refusal names: the rule that is in the request's way.
_RULES: Final = {
    RefusalKind.UNAVAILABLE: ("process died",),
    RefusalKind.INVALID: ("context_length", "max_prefill_tokens", "KV cache", "the prompt is empty"),
    RefusalKind.DUPLICATE: ("is alive",),
    RefusalKind.BUSY: ("max_queued_requests",),
    RefusalKind.NOT_FOUND: ("must be loaded", "being unloaded"),
}


class Life:
    """One request, from its ``Generate`` to its terminal reply or its refusal. ``ids`` is prompt and output.

    ``versions`` are the weights that computed what it was told, each once. ``cached_tokens`` is what its client is
    told: where its computation began when it started for the first time. ``prompt_logprobs`` are what it was told of
    its prompt. ``lora_path`` is where its adapter is.
    """

    __slots__ = (
        "cached_tokens",
        "end",
        "ids",
        "limit",
        "lora_path",
        "message",
        "parts",
        "prompt_logprobs",
        "prompt_tokens",
        "refused",
        "retractions",
        "rid",
        "running",
        "since",
        "started",
        "stop_ids",
        "tenancy",
        "versions",
        "waits_s",
    )

    def __init__(self, message: Generate, limits: Limits, now: float = 0.0) -> None:
        self.message = message
        self.since = now
        waits = [one for one in (message.waiting_timeout_s, limits.waiting_timeout_s) if one is not None]
        self.waits_s = min(waits, default=None)
        self.rid = message.rid
        self.parts = self.retractions = 0
        self.ids = list(message.prompt_ids)
        self.prompt_tokens = len(self.ids)
        self.limit = min(self.prompt_tokens + message.sampling.max_new_tokens, limits.context_length)
        self.stop_ids = message.sampling.stop_token_ids
        if not message.sampling.ignore_eos or message.sampling.grammar is not None:
            self.stop_ids += limits.eos_token_ids
        self.tenancy: Tenancy | None = None
        self.running = self.started = False
        self.end: FinishReason | None = None
        self.refused = False
        self.cached_tokens = 0
        self.versions: tuple[int, ...] = ()
        self.lora_path: str | None = None
        self.prompt_logprobs: tuple[PromptLogprob, ...] = ()

    @property
    def due(self) -> range:
        """The positions whose logits have not yet given the prompt logprob that was asked for."""
        first = self.message.prompt_logprobs_from
        return range(0) if first < 0 else range(first + len(self.prompt_logprobs), self.prompt_tokens - 1)

    @property
    def most_hit(self) -> int:
        """How many of its tokens may come from the cache: none whose logits are needed."""
        return self.due.start if self.due else len(self.ids) - 1

    def out_of_time(self, now: float) -> str | None:
        """The name of the time limit that is over first; None while none is."""
        own, waits = self.message.timeout_s, None if self.started else self.waits_s
        if waits is not None and now >= self.since + waits and (own is None or waits < own):
            return "waiting_timeout_s"
        return "timeout_s" if own is not None and now >= self.since + own else None

    @property
    def tokens(self) -> tuple[int, ...]:
        """The output so far."""
        return tuple(self.ids[self.prompt_tokens :])


class Told(NamedTuple):
    """What a client is told in one step."""

    rid: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    error: str | None
    prompt_logprobs: tuple[PromptLogprob, ...] = ()


# The same without the names, which cost as much as all the rest; they are there where two differ.
_Told = tuple[str, tuple[int, ...], FinishReason | None, int, int, int, str | None, tuple[PromptLogprob, ...]]


class Flight:
    """A microbatch in flight, with the life and the tenancy of each of its segments, in their order."""

    __slots__ = ("id", "lives", "mode", "segments", "tenancies")

    def __init__(self, microbatch: Microbatch, lives: list[Life], tenancies: list[Tenancy]) -> None:
        self.id = microbatch.id
        self.mode = microbatch.mode
        self.segments = microbatch.segments
        self.lives = lives
        self.tenancies = tenancies

    @property
    def work(self) -> Iterable[tuple[Segment, Life, Tenancy]]:
        """Each segment with its life and tenancy."""
        return zip(self.segments, self.lives, self.tenancies, strict=True)


class Totals:
    """What was counted since the engine was new; the names are those of the engine's counters."""

    __slots__ = (
        "accepted_tokens",
        "cached_tokens",
        "drafted_tokens",
        "forward_ct",
        "generated_tokens",
        "lora_evictions",
        "lora_loads",
        "prompt_tokens",
        "requests_aborted",
        "requests_finished",
        "requests_refused",
        "requests_started",
        "requests_timed_out",
        "retractions",
        "weights_version",
    )

    def __init__(self) -> None:
        for name in self.__slots__:
            setattr(self, name, 0)

    accepted_tokens: int
    cached_tokens: int
    drafted_tokens: int
    forward_ct: int
    generated_tokens: int
    lora_evictions: int
    lora_loads: int
    prompt_tokens: int
    requests_aborted: int
    requests_finished: int
    requests_refused: int
    requests_started: int
    requests_timed_out: int
    retractions: int
    weights_version: int

    def as_dict(self) -> dict[str, int]:
        """The counts by name."""
        return {name: getattr(self, name) for name in self.__slots__}


class ClientAccount:
    """The account of one engine, from its first step on. ``follow`` takes each step and raises Violation.

    ``lives`` are all requests by arrival, ``live`` those that have not ended, by rid. ``stats`` is the newest answer to
    a question for the counters.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.lives: list[Life] = []
        self.live: dict[str, Life] = {}
        self.partial: Life | None = None
        self.flights: deque[Flight] = deque()
        self.pages = Pages(limits)
        self.calls = Calls()
        self.profiles = ProfileCalls()
        self.grammars = GrammarAccount()
        self.adapters = AdapterCalls(limits)
        self.paused: PauseMode | None = None
        self.dead: PipelineFailed | None = None
        self.stats: EngineStats | None = None
        self.totals = Totals()
        self._step: int | None = None
        self._now = 0.0
        # Whether any request has a time limit.
        self._timed = limits.waiting_timeout_s is not None
        self._may_wait = False
        # When a gate that waits makes a step all the same.
        self._wakes_at: float | None = None
        self._expected: list[_Told] = []
        self._refusals: list[tuple[str, RefusalKind]] = []
        self._asked_stats: dict[str, dict[str, int]] = {}

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return not self.live and not self.calls.open

    @property
    def is_quiescent(self) -> bool:
        """Nothing is in flight and no request owns memory."""
        return not (self.flights or self.pages.rows)

    @property
    def waiting(self) -> int:
        """Requests that wait in the queue."""
        return sum([life.tenancy is None for life in self.live.values()])

    def follow(self, events: Sequence[Event], result: StepResult, now: float) -> None:
        """Account for one step. Raises Violation for a reply or a plan that events and time do not account for."""
        self._check_step(events, result, now)
        self.calls.begin_step()
        self._now = now
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(self, event)
        if self._timed:
            self._end_overdue()
        if result.grammars:
            self.grammars.note(result.grammars, [life.message for life in self.live.values()])
        # A step that only launches may launch the update that waits: a retraction has left the engine quiescent.
        if result.replies or events or result.microbatch is not None or self._expected:
            if self.calls.open:
                self.calls.begin_waiting_update(quiescent=self.is_quiescent)
            self._hear(result.replies)
            self.calls.end_step()
            self.adapters.end_step()
        microbatch = result.microbatch
        if microbatch is not None:
            if microbatch.mode is _PROFILE:
                self.profiles.launch(microbatch)
            # After a flush that should have been refused, the account of memory is of no use.
            if not self.calls.suspicion:
                self._on_launch(microbatch)
        slot = self.dead is None and self.calls.update is None and len(self.flights) < self._limits.depth
        self.profiles.end_step(has_slot=slot)

    def check_end(self) -> None:
        """The engine is idle. Every client must have been told how its request ended. Raises Violation."""
        if self.live:
            raise Violation(f"{', '.join(self.live)} never got a terminal reply")
        self.calls.check_end()

    def _check_step(self, events: Sequence[Event], result: StepResult, now: float) -> None:
        woken, self._wakes_at = self._wakes_at is not None and now >= self._wakes_at, result.deadline
        quiet, self._may_wait = not events and not woken and self._may_wait, not result.again
        if quiet and result.microbatch is not None:
            raise Violation(f"a gate that waits for an event would have missed microbatch {result.microbatch.id}")
        if self._step is not None and result.step != self._step + 1:
            raise Violation(f"step {result.step} follows step {self._step}")
        self._step = result.step

    # -- events --

    def _on_generate(self, message: Generate) -> None:
        life = Life(message, self._limits, self._now)
        self._timed = self._timed or message.timeout_s is not None or message.waiting_timeout_s is not None
        self.lives.append(life)
        refusal = self._refusal_of(life, self.live, self.waiting)
        if refusal is not None:
            life.refused = True
            self._refusals.append((message.rid, refusal))
            self.totals.requests_refused += 1
            return
        life.lora_path = None if message.lora is None else self.adapters.paths[message.lora]
        self.live[message.rid] = life
        self.totals.requests_started += 1
        self.totals.prompt_tokens += life.prompt_tokens

    def check_refusal(self, message: Generate, refusal: Refusal, ahead: Iterable[Event]) -> None:
        """A request is refused before a step has seen it, with ``ahead`` on the way to the engine before it.

        Raises Violation where nothing is in its way, or where the refusal is of another rule than that.
        """
        live = {rid: life.tenancy is None for rid, life in self.live.items()}
        for other in ahead:
            if isinstance(other, Generate):
                live[other.rid] = True
            elif isinstance(other, Abort):
                live.pop(other.rid, None)
            elif isinstance(other, AbortAll) or (isinstance(other, PauseGeneration) and other.mode is PauseMode.ABORT):
                live.clear()
        due = self._refusal_of(Life(message, self._limits), live, sum(live.values()))
        if refusal.kind is not due:
            raise Violation(f"{message.rid} is refused as {refusal.kind}, but due is {due}: {refusal.message}")
        if refusal.rid != message.rid or not any(rule in refusal.message for rule in _RULES[refusal.kind]):
            raise Violation(f"{message.rid} is refused as {refusal.kind} without the rule or its rid: {refusal}")

    def _refusal_of(self, life: Life, live: Container[str], waiting: int) -> RefusalKind | None:
        """Why a request that arrives now must be refused; None when it must enter the queue."""
        if self.dead is not None:
            return RefusalKind.UNAVAILABLE
        if self._never_fits(life):
            return RefusalKind.INVALID
        if life.message.lora is not None and not self.adapters.may_ask_for(life.message.lora):
            return RefusalKind.NOT_FOUND
        if life.rid in live:
            return RefusalKind.DUPLICATE
        return RefusalKind.BUSY if waiting >= self._limits.max_queued_requests else None

    def _never_fits(self, life: Life) -> bool:
        """By its numbers: the prompt leaves no room for a token, or the KV of all but the last token has none.

        A prompt that nothing is to follow may fill the context.
        """
        limits, prompt = self._limits, life.prompt_tokens
        longest = limits.context_length - (life.message.sampling.max_new_tokens > 0)
        if not 0 < prompt <= longest or (not limits.chunking and prompt > limits.prefill_budget_tokens):
            return True
        return max(life.limit, prompt + 1) - 1 > limits.total_pages * limits.page_size

    def _on_abort(self, abort: Abort) -> None:
        if abort.call_id is not None:
            self.calls.ask(abort.call_id, abort, quiescent=False)
        life = self.live.get(abort.rid)
        if life is not None:
            self._end(life, abort.finish_reason)

    def _on_abort_all(self, abort: AbortAll) -> None:
        if abort.call_id is not None:
            self.calls.ask(abort.call_id, abort, quiescent=False)
        for life in list(self.live.values()):
            self._end(life, _ABORT)

    def _on_pause(self, pause: PauseGeneration) -> None:
        self.calls.ask(pause.call_id, pause, quiescent=False)
        self.paused = pause.mode
        if pause.mode is PauseMode.ABORT:
            self._on_abort_all(AbortAll())
        elif pause.mode is PauseMode.RETRACT:
            self.partial = None
            for life in self.live.values():
                life.running = False
                if life.tenancy is not None and not life.tenancy.leaving:
                    self.pages.leave(life.tenancy)
                    self._note_if_retracted(life)

    def _on_continue(self, message: ContinueGeneration) -> None:
        self.calls.ask(message.call_id, message, quiescent=False)
        self.paused = None

    def _on_profile(self, call: StartProfile | StopProfile) -> None:
        self.calls.ask(call.call_id, call, quiescent=False)
        self.profiles.ask(call)
        if self.dead is not None:
            self.profiles.give_up()

    def _on_adapter_call(self, call: LoadAdapter | UnloadAdapter) -> None:
        self.calls.ask(call.call_id, call, quiescent=False)
        self.adapters.ask(call, is_used=self._is_used(call.name))

    def _is_used(self, adapter: str) -> bool:
        """Whether a request of this adapter is alive or owns memory."""
        rows = self.pages.rows.values()
        alive = any(life.message.lora == adapter for life in self.live.values())
        return alive or any(tenancy.lora in self.adapters.versions_of(adapter) for tenancy in rows)

    def _on_call(self, call: FlushCache | UpdateWeights) -> None:
        if self.calls.ask(call.call_id, call, quiescent=self.is_quiescent):
            self.pages.flush()

    def _on_get_stats(self, message: GetStats) -> None:
        self.calls.ask(message.call_id, message, quiescent=False)
        self._asked_stats[message.call_id] = self.totals.as_dict() | {
            "waiting": self.waiting,
            "chunked": int(self.partial is not None),
            "running": sum(life.running for life in self.live.values()),
            "in_flight": len(self.flights),
            "alive": len(self.live),
        }

    def _on_pipeline_failed(self, failed: PipelineFailed) -> None:
        self.dead = self.dead or failed
        for alive in list(self.live.values()):
            self._end(alive, FinishReason.ERROR, error=str(failed))
        self.profiles.give_up()
        self.adapters.lose()
        while self.flights:
            for segment, _, tenancy in self.flights.popleft().work:
                self.pages.land(segment, tenancy, confirmed=False)

    def _on_completion(self, completion: Completion) -> None:
        if not self.flights or completion.microbatch_id < self.flights[0].id:
            return  # It was given up when the pipeline failed.
        flight = self.flights.popleft()
        if flight.id != completion.microbatch_id:
            raise Violation(f"microbatch {completion.microbatch_id} came back, {flight.id} was launched first")
        if flight.mode is _UPDATE and self.calls.land_update(completion.error):
            self.totals.weights_version += 1
            self.pages.flush()
        if flight.mode is _PROFILE:
            self.profiles.land(completion.error)
        if flight.mode is ForwardMode.ADAPTER:
            self._on_change(completion.error)
        for rid, why in completion.errors:
            for life in flight.lives:
                if life.rid == rid and life.end is None:
                    self._end(life, FinishReason.ERROR, error=why)
        tokens, accepted = iter(completion.token_ids), iter(completion.accepted)
        if completion.prompt_logprobs:
            self._on_parts(flight, completion)
        for segment, life, tenancy in flight.work:
            if completion.error is not None and life.end is None:
                self._end(life, FinishReason.ERROR, error=completion.error)
            confirmed, rejected = life.end is None, 0
            if not segment.drafts:
                self.pages.land(segment, tenancy, confirmed=confirmed)
            elif completion.error is None:
                rejected = segment.drafts - next(accepted)
                self.totals.drafted_tokens += segment.drafts
                self.totals.accepted_tokens += segment.drafts - rejected
            if segment.emits and completion.error is None:
                for _ in range(segment.choosers - rejected):
                    self._on_token(life, next(tokens), tenancy)
            elif life.end is None and not tenancy.in_flight and tenancy.planned == life.limit:
                # Nothing is to follow the prompt, and all of it is computed.
                self._end(life, FinishReason.LENGTH)
            if segment.drafts:
                # After the tokens: what was guessed right belongs to the request only now.
                tenancy.planned -= rejected
                self.pages.land(segment, tenancy, confirmed=confirmed, rejected=rejected)
            # After the token, because a request on its way back to the queue may end with it.
            if life.tenancy is not None and life.tenancy.leaving:
                self._note_if_retracted(life)

    def _on_parts(self, flight: Flight, completion: Completion) -> None:
        """Prompt logprobs: each part is told with its chunk's result, before the tokens of any."""
        parts = iter(completion.prompt_logprobs)
        version = self.totals.weights_version
        for segment, life, _ in flight.work:
            if segment.logprobs_from < 0:
                continue
            part = next(parts)
            if life.end is None:
                self._expect(life, (), None, None, part)
                life.prompt_logprobs += part
                life.versions += () if version in life.versions else (version,)

    def _on_change(self, error: str | None) -> None:
        change = self.adapters.land(error)
        self.totals.lora_loads, self.totals.lora_evictions = self.adapters.loads, self.adapters.evictions
        if error is None or self.adapters.is_asked_for(change):
            return
        for life in [one for one in self.live.values() if one.message.lora == change.name]:
            self._end(life, FinishReason.ERROR, error=error)

    def _on_token(self, life: Life, token: int, tenancy: Tenancy) -> None:
        if life.end is not None:
            return
        life.ids.append(token)
        self.totals.generated_tokens += 1
        version = self.totals.weights_version
        if version not in life.versions:
            life.versions += (version,)
        life.running = not tenancy.leaving
        if token in life.stop_ids:
            self._end(life, FinishReason.STOP, token)
        elif len(life.ids) >= life.limit:
            self._end(life, FinishReason.LENGTH, token)
        else:
            self._expect(life, (token,), None, None)

    def _end(self, life: Life, reason: FinishReason, *tokens: int, error: str | None = None) -> None:
        if (tokens or reason is FinishReason.LENGTH) and life.due:
            raise Violation(f"{life.rid} ends with {reason}, but its prompt logprobs of {life.due} were never told")
        self._expect(life, tokens, reason, error)
        if reason is _ABORT:
            self.totals.requests_aborted += 1
        elif reason is _TIMEOUT:
            self.totals.requests_timed_out += 1
        else:
            self.totals.requests_finished += 1
        life.end, life.running = reason, False
        del self.live[life.rid]
        if self.partial is life:
            self.partial = None
        if life.tenancy is not None and not life.tenancy.leaving:
            self.pages.leave(life.tenancy)

    def _expect(
        self,
        life: Life,
        tokens: tuple[int, ...],
        reason: FinishReason | None,
        error: str | None,
        part: tuple[PromptLogprob, ...] = (),
    ) -> None:
        prompt = life.prompt_tokens
        completed = len(life.ids) - prompt
        self._expected.append((life.rid, tokens, reason, prompt, completed, life.cached_tokens, error, part))

    def _end_overdue(self) -> None:
        for life in list(self.live.values()):
            limit = life.out_of_time(self._now)
            if limit is not None:
                self._end(life, _TIMEOUT, error=limit)

    # -- replies --

    def _hear(self, replies: Sequence[Reply]) -> None:
        told: list[_Told] = []
        refused: list[tuple[str, RefusalKind]] = []
        for reply in replies:
            if isinstance(reply, TokenOutput):
                told.append(_told_by(reply))
            elif isinstance(reply, Refusal):
                refused.append((reply.rid, reply.kind))
            elif isinstance(reply, CallAnswer):
                if isinstance(self.calls.open.get(reply.call_id), StartProfile | StopProfile):
                    self.profiles.answered(reply)
                self.adapters.answered(reply)
                if self.calls.answered(reply, quiescent=self.is_quiescent, dead=self.dead is not None):
                    self.pages.flush()
            else:
                self._hear_stats(reply.call_id, reply.stats)
        if refused != self._refusals:
            self._explain_refusals(refused)
        if told != self._expected:
            _compare_told([Told(*one) for one in told], [Told(*one) for one in self._expected])
        self._refusals.clear()
        self._expected.clear()

    def _hear_stats(self, call_id: str, stats: EngineStats) -> None:
        if self.calls.open.pop(call_id, None) is None:
            raise Violation(f"{call_id} is answered with counters, but no call is open")
        self.stats = stats
        for name, count in self._asked_stats.pop(call_id).items():
            if getattr(stats, name) != count:
                raise Violation(f"{name} is {getattr(stats, name)}, but the clients' count is {count}")

    def _explain_refusals(self, refused: list[tuple[str, RefusalKind]]) -> None:
        """Raise Violation with the first difference between who was refused and who had to be."""
        due, most = self._refusals, self._limits.max_queued_requests
        for rid, kind in due:
            if (rid, kind) not in refused:
                raise Violation(f"{rid} must be refused as {kind}, but is not: max_queued_requests is {most}")
        for rid, kind in refused:
            if (rid, kind) not in due:
                raise Violation(f"{rid} is refused as {kind}, but nothing is in its way: max_queued_requests is {most}")
        raise Violation(f"the refusals {due} are told as {refused}")

    # -- plans --

    def _on_launch(self, microbatch: Microbatch) -> None:
        self._check_launch(microbatch)
        lives: list[Life] = []
        tenancies: list[Tenancy] = []
        for segment in microbatch.segments:
            life, tenancy = self._tenant_of(segment)
            lives.append(life)
            tenancies.append(tenancy)
        decodes = sum([life.running for life in lives])
        self.pages.launch(microbatch.segments, tenancies)
        for segment, life, tenancy in zip(microbatch.segments, lives, tenancies, strict=True):
            self._check_tokens(segment, life, tenancy)
        if lives:
            some = ForwardMode.MIXED if decodes else ForwardMode.PREFILL
            mode = _DECODE if decodes == len(lives) else some
            if microbatch.mode is not mode:
                raise Violation(f"microbatch {microbatch.id} is called {microbatch.mode}, but has what makes it {mode}")
        self.flights.append(Flight(microbatch, lives, tenancies))
        self.totals.forward_ct += 1

    def _check_launch(self, microbatch: Microbatch) -> None:
        number, limits, flights = microbatch.id, self._limits, self.flights
        if number != self.totals.forward_ct:
            raise Violation(f"microbatch {number} is launched, but it is number {self.totals.forward_ct}")
        if flights and flights[-1].mode is _UPDATE:
            raise Violation(f"microbatch {number} is launched while the weights are being updated")
        if microbatch.mode is _UPDATE:
            self._check_update(microbatch)
            return
        if len(flights) >= limits.depth:
            raise Violation(f"microbatch {number} is launched, {limits.depth} are in flight already")
        if microbatch.adapter is not None:
            in_use = {tenancy.lora for tenancy in self.pages.rows.values()}
            self.adapters.launch(microbatch.adapter, in_use, is_used=self._is_used(microbatch.adapter.name))
        if microbatch.is_control:
            return
        if self.paused is not None:
            raise Violation(f"microbatch {number} is launched while generation is paused")
        most = limits.decode_budget_tokens if microbatch.mode is _DECODE else limits.prefill_budget_tokens
        if not 1 <= microbatch.tokens <= most:
            raise Violation(f"microbatch {number} has {microbatch.tokens} tokens, the budget is {most}")
        bound = limits.microbatch_requests
        if bound is not None and len(microbatch.segments) > bound:
            raise Violation(f"microbatch {number} has {len(microbatch.segments)} requests, the bound is {bound}")
        if len(microbatch.segments) > 1 and len(set(rids := microbatch.rids)) != len(rids):
            raise Violation(f"a request is in microbatch {number} twice: {', '.join(rids)}")

    def _check_update(self, microbatch: Microbatch) -> None:
        if not self.is_quiescent:
            busy = [flight.id for flight in self.flights], list(self.pages.rows.values())
            raise Violation(
                f"the weights are updated while microbatches {busy[0]} are in flight and {busy[1]} own rows"
            )
        update = self.calls.update
        if update is None or update.model_path != microbatch.weights:
            raise Violation(f"the weights are updated to {microbatch.weights}, but asked for is {update}")

    def _tenant_of(self, segment: Segment) -> tuple[Life, Tenancy]:
        """The request of a segment and its stay in the segment's row; a new one when the segment brings a spec."""
        life = self.live.get(segment.rid)
        if life is None:
            raise Violation(f"{segment.rid} is computed although it is not alive")
        tenancy = life.tenancy
        if segment.sampling is None:
            if tenancy is None or tenancy.leaving or tenancy.row != segment.row:
                raise Violation(f"{segment.rid} goes on in row {segment.row}, but its row is {tenancy}")
            return life, tenancy
        before = self.pages.rows.get(segment.row)
        for old in (tenancy, before):
            if old is not None and self.pages.rows.get(old.row) is old:
                self.retract(old)
        if not life.started:
            life.started, life.cached_tokens = True, segment.start
            self.totals.cached_tokens += segment.start
        self.grammars.check_start(life.message, segment.sampling)
        life.tenancy = tenancy = Tenancy(life.rid, segment.row, life.ids, segment.start, segment.lora)
        self.pages.open(tenancy)
        return life, tenancy

    def _check_tokens(self, segment: Segment, life: Life, tenancy: Tenancy) -> None:
        """Positions without a gap, the request's own tokens, and at most one request that is partly computed."""
        start, known = segment.start, len(life.ids)
        end = start + len(segment.token_ids) - segment.drafts
        if segment.lora or life.message.lora is not None:
            self.adapters.computes(segment, life.message.lora)
        if segment.lora != tenancy.lora:
            raise Violation(f"{life.rid} began with version {tenancy.lora} of its adapter, now it is {segment.lora}")
        if start != tenancy.planned or tuple(life.ids[start:end]) != segment.token_ids[: end - start]:
            raise Violation(f"{life.rid} is due at position {tenancy.planned} of {life.ids}, planned is {segment}")
        emits = end == known < life.limit
        if segment.emits is not emits:
            raise Violation(f"{life.rid} has {known} tokens, computed up to {end} it emits one is {emits}")
        if segment.logprobs_from >= 0 or life.message.prompt_logprobs_from >= 0:
            # Of this stay in a row, that is: what a request was asked before it was sent back has come.
            asked = [one for flight in self.flights for one, _, other in flight.work if other is tenancy]
            check_asked(segment, life.ids, life.due, asked)
        if segment.drafts and (end != known or known + segment.drafts >= life.limit):
            raise Violation(f"{life.rid} has {known} of at most {life.limit} tokens and guesses: {segment}")
        tenancy.planned = end + segment.drafts
        if end < known:
            if self.partial is not None and self.partial is not life:
                raise Violation(f"{life.rid} is split while {self.partial.rid} is partly computed")
            self.partial = life
            life.parts += 1
        elif self.partial is life:
            self.partial = None
            life.parts += 1

    # -- retractions --

    def retract(self, tenancy: Tenancy) -> None:
        """The engine takes a request's memory without an event that asks for it. It may, while the request decodes."""
        life = self.live.get(tenancy.rid)
        if life is None or life.tenancy is not tenancy or tenancy.in_flight or not life.running:
            raise Violation(f"{tenancy.rid} lost its memory, but it is in flight or was not decoding")
        life.running = False
        self.pages.leave(tenancy)
        self._note_if_retracted(life)

    def _note_if_retracted(self, life: Life) -> None:
        tenancy = life.tenancy
        if tenancy is not None and tenancy.leaving and not tenancy.in_flight and life.end is None:
            life.tenancy = None
            life.retractions += 1
            self.totals.retractions += 1

    def _on_grammar_ready(self, ready: GrammarReady) -> None:
        failed = self.grammars.answer(ready)
        for life in [
            one for one in self.live.values() if failed is not None and one.message.sampling.grammar == failed
        ]:
            self._end(life, FinishReason.ERROR, error=ready.error)

    _handlers: ClassVar[dict[type, Callable[[ClientAccount, Any], None]]] = {
        Completion: _on_completion,
        PipelineFailed: _on_pipeline_failed,
        GrammarReady: _on_grammar_ready,
        Generate: _on_generate,
        Abort: _on_abort,
        AbortAll: _on_abort_all,
        PauseGeneration: _on_pause,
        ContinueGeneration: _on_continue,
        FlushCache: _on_call,
        UpdateWeights: _on_call,
        LoadAdapter: _on_adapter_call,
        UnloadAdapter: _on_adapter_call,
        StartProfile: _on_profile,
        StopProfile: _on_profile,
        GetStats: _on_get_stats,
    }


def check_answers(handles: Iterable[RequestHandle]) -> None:
    """What left the scheduler once has reached its client once. Raises Violation."""
    for handle in handles:
        client = handle.client
        if client.terminal_answers != 1 and client.status is not None and not client.dropped:
            raise Violation(f"the client of {handle.rid} got {client.terminal_answers} terminal answers: {client}")
        due = (None, *[value.logprob for value in handle.prompt_logprobs])
        is_whole = handle.message.prompt_logprobs_from >= 0 and client.finish_reason in _COMPLETE
        if is_whole and client.input_logprobs != due:
            raise Violation(f"the client of {handle.rid} got the logprobs {client.input_logprobs}, but told were {due}")


def _told_by(output: TokenOutput) -> _Told:
    return (
        output.rid,
        output.token_ids,
        output.finish_reason,
        output.prompt_tokens,
        output.completion_tokens,
        output.cached_tokens,
        _limit_named(output.error) if output.finish_reason is _TIMEOUT else output.error,
        output.prompt_logprobs,
    )


def _limit_named(error: str | None) -> str | None:
    """The time limit that a client is told of."""
    return next((name for name in ("waiting_timeout_s", "timeout_s") if f" {name} is " in (error or "")), error)


def _compare_told(told: list[Told], due: list[Told]) -> None:
    """Every token and every end is told once, as the events of the step say. Raises Violation with what differs."""
    extra, missing = list(told), []
    for one in due:
        if one in extra:
            extra.remove(one)
        else:
            missing.append(one)
    for one in extra:
        same = next((other for other in missing if other.rid == one.rid), None)
        if same is None:
            raise Violation(f"{one.rid} gets a reply after its terminal one, or without being alive: {one}")
        raise Violation(_difference(one, same))
    for one in missing:
        if one.prompt_logprobs:
            count = len(one.prompt_logprobs)
            raise Violation(f"{one.rid} has the logprobs of {count} tokens of its prompt, but its client was not told")
        ends = {_ABORT: "was aborted", _TIMEOUT: "has no time left"}
        what = "has a result" if one.finish_reason is None else ends.get(one.finish_reason, "has a result")
        raise Violation(f"{one.rid} {what}, but its client was not told: {one}")


def _difference(told: Told, due: Told) -> str:
    """What is wrong with a reply, given the one that the events account for."""
    rid = told.rid
    if told.token_ids != due.token_ids:
        return f"{rid} is told the tokens {told.token_ids}, but its result is {due.token_ids}"
    if told.finish_reason is not due.finish_reason:
        if told.finish_reason is None and due.finish_reason is FinishReason.STOP:
            return f"{rid} goes on after its stop token: {told.token_ids}"
        reason, tokens = told.finish_reason, told.completion_tokens
        return f"{rid} ends with {reason} after {tokens} tokens: nothing explains that, due is {due.finish_reason}"
    if told.prompt_logprobs != due.prompt_logprobs:
        return (
            f"{rid} is told the prompt logprobs {[one.logprob for one in told.prompt_logprobs]}, but its result has "
            f"{[one.logprob for one in due.prompt_logprobs]}"
        )
    if told.error != due.error:
        return f"{rid} ends with the wrong error: {told.error!r}, what happened is {due.error!r}"
    if told.cached_tokens != due.cached_tokens:
        return f"{rid} is told {told.cached_tokens} cached tokens, but began at position {due.cached_tokens}"
    counts = (told.completion_tokens, told.prompt_tokens), (due.completion_tokens, due.prompt_tokens)
    return f"{rid} is told the counts {counts[0]} of output and prompt, but they are {counts[1]}"
