"""The ledger: what every client of a schedule was told, and what must hold of it whatever the schedule.

It believes nobody: it sees events, microbatches and replies from outside and raises a Violation at the first that
breaks a promise. The engine's own books are audited beside it, not by it.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.limits import Limits
from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    ContinueGeneration,
    EngineStats,
    Event,
    EvictCache,
    FinishReason,
    FlushCache,
    Generate,
    GetStats,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    Refusal,
    RefusalKind,
    ReleasePressure,
    Reply,
    SetPressure,
    StatsAnswer,
    TokenOutput,
    UpdateWeights,
)
from engine.plan import ForwardMode, Microbatch, Segment
from engine.scheduler import StepResult
from engine.scheduler.policy import OVERTAKEN_LIMIT_REQUESTS, Rank, policy_named

__all__ = ["Ledger", "Life", "Violation"]


class Violation(AssertionError):  # noqa: N818 - it reads as what happened
    """A promise to a client was broken; the text says which."""


class Life:
    """One request as its client and the stages see it. ``planned`` is the position behind its last segment.

    ``weights`` are those that computed its tokens, each once: None for the configured ones.
    """

    __slots__ = (
        "decoding",
        "emitting",
        "end",
        "message",
        "passed",
        "planned",
        "refused",
        "started",
        "tokens",
        "weights",
    )

    def __init__(self, message: Generate) -> None:
        self.message = message
        self.tokens: list[int] = []
        self.weights: set[str | None] = set()
        self.end: FinishReason | None = None
        self.refused = False
        self.planned = 0
        self.emitting = 0
        self.decoding = False
        self.started = False
        self.passed = 0


class Ledger:
    """The books of one run, kept step by step."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self.lives: list[Life] = []
        # Lives of one rid queue up; the oldest that has not ended is the live one.
        self._live: dict[str, list[Life]] = {}
        self._open_calls: dict[str, str] = {}
        # Calls that may wait: all that are open, and those of this step.
        self._patient: set[str] = set()
        self._asked: set[str] = set()
        self._flights: list[tuple[int, list[Life]]] = []
        self._updates: dict[str, str | None] = {}
        self._weights: str | None = None
        self._updating = False
        # Why the stages could not do the update whose result came last.
        self._update_error: str | None = None
        self.paused = False
        # Microbatches that were launched, updates of the weights that succeeded.
        self.launched = 0
        self.updated = 0
        # The newest answer to a question for the counters; the last step that was seen.
        self.stats: EngineStats | None = None
        self._step: int | None = None
        self._may_abort: set[str] = set()
        self._may_fail = False
        self._dead = ""
        self._may_wait = False

    @property
    def is_settled(self) -> bool:
        """Every request has ended and every call is answered."""
        return not self._live and not self._open_calls

    def live_rids(self) -> list[str]:
        """Requests that have not ended, in order of arrival."""
        return list(self._live)

    def check(self, events: Sequence[Event], result: StepResult, *, flushable: bool) -> None:
        """Book one step. ``flushable`` says that nothing was in flight or owned memory before it.

        Raises Violation when the step broke a promise.
        """
        quiet, self._may_wait = not events and self._may_wait, not result.again
        if quiet and result.microbatch is not None:
            raise Violation(f"a gate that waits for an event would have missed microbatch {result.microbatch.id}")
        if self._step is not None and result.step != self._step + 1:
            raise Violation(f"step {result.step} follows step {self._step}")
        self._step = result.step
        self._asked.clear()
        dying = [self._see(event) for event in events]
        alone = sum(not isinstance(event, GetStats) for event in events) == 1
        for reply in result.replies:
            self._hear(reply, flushable=flushable and alone)
        for life in [one for lives in dying for one in lives]:
            if life.end is None and not life.refused:
                raise Violation(f"{life.message.rid} was aborted, but its client was not told")
        if result.microbatch is not None:
            self._check_microbatch(result.microbatch)

    def check_end(self) -> None:
        """The engine says that it is idle: then everybody must have been told how it ended, once."""
        if self._live:
            raise Violation(f"{', '.join(self._live)} never got a terminal reply")
        if self._open_calls:
            raise Violation(f"{', '.join(self._open_calls.values())} never got an answer")

    # -- events --

    def _see(self, event: Event) -> list[Life]:
        """Book an event; returns the requests that must end with it."""
        if isinstance(event, Completion):
            _, landed = self._flights.pop(0)
            if self._updating:
                self._updating, self._update_error = False, event.error
            for life in landed:
                life.emitting -= 1
            if event.error is not None:
                self._may_fail = True
        elif isinstance(event, Generate):
            life = Life(event)
            self.lives.append(life)
            self._live.setdefault(event.rid, []).append(life)
        elif isinstance(event, PipelineFailed):
            self._may_fail, self._dead = True, event.process
            self._flights.clear()
            self._updating = False
            return self._oldest()
        elif isinstance(event, Abort):
            if event.call_id is not None:
                self._open_calls[event.call_id] = "abort"
            lives = self._live.get(event.rid, [])[:1]
            self._may_abort.update(life.message.rid for life in lives)
            return lives
        elif isinstance(event, GetStats):
            self._open_calls[event.call_id] = GetStats.__name__
        elif not isinstance(event, SetPressure | ReleasePressure | EvictCache):
            return self._see_call(event)
        return []

    def _see_call(self, event: Event) -> list[Life]:
        call_id = getattr(event, "call_id", None)
        assert call_id is not None, f"a schedule has no {event}"
        self._open_calls[call_id] = type(event).__name__
        if getattr(event, "timeout_s", None):
            self._patient.add(call_id)
            self._asked.add(call_id)
        if isinstance(event, UpdateWeights):
            self._updates[call_id] = event.model_path
            return []
        if isinstance(event, PauseGeneration):
            self.paused = True
            if event.mode is not PauseMode.ABORT:
                return []
        elif not isinstance(event, AbortAll):
            self.paused = self.paused and not isinstance(event, ContinueGeneration)
            return []
        self._may_abort.update(self._live)
        return self._oldest()

    def _oldest(self) -> list[Life]:
        return [lives[0] for lives in self._live.values()]

    # -- replies --

    def _hear(self, reply: Reply, *, flushable: bool) -> None:
        if isinstance(reply, TokenOutput):
            self._hear_output(reply)
        elif isinstance(reply, Refusal):
            lives = self._live.get(reply.rid)
            if not lives:
                raise Violation(f"{reply.rid} is refused, but is not alive: {reply.message}")
            self._end(self._refused(lives, reply), None)
        elif isinstance(reply, StatsAnswer):
            if self._open_calls.pop(reply.call_id, None) != GetStats.__name__:
                raise Violation(f"{reply.call_id} is answered with counters, but nobody asked for them")
            self.stats = reply.stats
        elif isinstance(reply, CallAnswer):
            kind = self._open_calls.pop(reply.call_id, None)
            if kind is None:
                raise Violation(f"{reply.call_id} is answered, but no call is open: {reply.message}")
            if kind == FlushCache.__name__ and not reply.ok and flushable:
                raise Violation(f"a flush is refused although nothing is in flight or owns memory: {reply.message}")
            if kind not in (FlushCache.__name__, UpdateWeights.__name__) and not reply.ok:
                raise Violation(f"{kind} can always be done, but is answered with {reply.message!r}")
            self._check_patience(reply)
            if kind == UpdateWeights.__name__:
                self._hear_update(reply)

    def _refused(self, lives: list[Life], refusal: Refusal) -> Life:
        """Which life of a rid a refusal ends: several may begin in one step, and some of those may be admitted."""
        if refusal.kind is RefusalKind.DUPLICATE:
            if len(lives) < 2:
                raise Violation(f"{refusal.rid} is refused as a duplicate, but is alive once: {refusal.message}")
            return lives[1]
        if refusal.kind is RefusalKind.INVALID:
            return next((life for life in lives if self._never_fits(life)), lives[-1])
        return lives[-1]

    def _never_fits(self, life: Life) -> bool:
        message = life.message
        most = max(1, message.sampling.max_new_tokens)
        return self._limits.why_never_fits(len(message.prompt_ids), most) is not None

    def _check_patience(self, answer: CallAnswer) -> None:
        """A call that may wait is not refused at once, unless another one waits or nothing can ever be done."""
        self._patient.discard(answer.call_id)
        if answer.call_id in self._asked and not (answer.ok or self._patient or self._dead):
            raise Violation(f"{answer.call_id} may wait, and is refused at once: {answer.message}")

    def _hear_update(self, answer: CallAnswer) -> None:
        weights = self._updates.pop(answer.call_id)
        if answer.ok and self._update_error is not None:
            raise Violation(f"the update to {weights} is said to have succeeded, but {self._update_error}")
        if answer.ok:
            self._weights = weights
            self.updated += 1

    def _hear_output(self, output: TokenOutput) -> None:
        lives = self._live.get(output.rid)
        if not lives:
            raise Violation(f"{output.rid} gets a reply after its terminal one, or without being alive: {output}")
        life = lives[0]
        life.tokens += output.token_ids
        if output.token_ids:
            life.weights.add(self._weights)
            life.decoding = True
        self._check_counts(life, output)
        stops = life.message.sampling.stop_token_ids
        if any(token in stops for token in life.tokens) and output.finish_reason is not FinishReason.STOP:
            raise Violation(f"{output.rid} goes on behind its stop token: {life.tokens}")
        if output.finish_reason is not None:
            self._check_reason(life, output)
            self._end(life, output.finish_reason)

    def _check_counts(self, life: Life, output: TokenOutput) -> None:
        rid, prompt = life.message.rid, len(life.message.prompt_ids)
        if output.completion_tokens != len(life.tokens) or output.prompt_tokens != prompt:
            raise Violation(
                f"{rid} got {len(life.tokens)} tokens for a prompt of {prompt}, but is told "
                f"{output.completion_tokens} and {output.prompt_tokens}"
            )
        if len(life.tokens) > self._most_tokens(life):
            raise Violation(f"{rid} got {len(life.tokens)} tokens, its limit is {self._most_tokens(life)}")

    def _check_reason(self, life: Life, output: TokenOutput) -> None:
        rid, reason = life.message.rid, output.finish_reason
        wrong = (
            (reason is FinishReason.LENGTH and len(life.tokens) != self._most_tokens(life))
            or (reason is FinishReason.ABORT and rid not in self._may_abort)
            or (reason is FinishReason.ERROR and not (self._may_fail and output.error and self._dead in output.error))
            or (
                reason is FinishReason.STOP
                and not any(t in life.message.sampling.stop_token_ids for t in life.tokens[-1:])
            )
        )
        if wrong:
            raise Violation(
                f"{rid} ends with {reason!s} after {len(life.tokens)} of {self._most_tokens(life)} tokens, "
                f"error {output.error!r}: nothing in the schedule explains that"
            )

    def _most_tokens(self, life: Life) -> int:
        prompt = len(life.message.prompt_ids)
        return min(life.message.sampling.max_new_tokens, self._limits.context_length - prompt)

    def _end(self, life: Life, reason: FinishReason | None) -> None:
        rid = life.message.rid
        life.end, life.refused = reason, reason is None
        lives = self._live[rid]
        lives.remove(life)
        if not lives:
            del self._live[rid]
            self._may_abort.discard(rid)

    # -- microbatches --

    def _check_microbatch(self, microbatch: Microbatch) -> None:
        limits = self._limits
        if microbatch.id != self.launched:
            raise Violation(f"microbatch {microbatch.id} is launched, but it is number {self.launched}")
        self.launched += 1
        if self._updating:
            raise Violation(f"microbatch {microbatch.id} is launched while the weights are being updated")
        if microbatch.mode is ForwardMode.UPDATE:
            self._check_update(microbatch)
            return
        if self.paused:
            raise Violation(f"microbatch {microbatch.id} is launched while generation is paused")
        if len(self._flights) >= limits.depth:
            raise Violation(f"microbatch {microbatch.id} is launched, {limits.depth} are in flight already")
        most = limits.rows if microbatch.mode is ForwardMode.DECODE else limits.prefill_budget_tokens
        if not 1 <= microbatch.tokens <= most:
            raise Violation(f"microbatch {microbatch.id} has {microbatch.tokens} tokens, the budget is {most}")
        rids = microbatch.rids
        if len(set(rids)) != len(rids):
            raise Violation(f"a request is in microbatch {microbatch.id} twice: {', '.join(rids)}")
        emitting = [life for segment in microbatch.segments if (life := self._check_segment(segment)) is not None]
        self._check_mode(microbatch)
        self._flights.append((microbatch.id, emitting))

    def _check_mode(self, microbatch: Microbatch) -> None:
        """The mode says what is inside: parts of prompts, tokens of those that have one, or both."""
        decodes = sum(self._live[segment.rid][0].decoding for segment in microbatch.segments)
        some = ForwardMode.MIXED if decodes else ForwardMode.PREFILL
        mode = ForwardMode.DECODE if decodes == len(microbatch.segments) else some
        if microbatch.mode is not mode:
            raise Violation(f"microbatch {microbatch.id} is called {microbatch.mode}, but has what makes it {mode}")

    def _check_update(self, microbatch: Microbatch) -> None:
        if self._flights:
            flights = [number for number, _ in self._flights]
            raise Violation(f"the weights are updated while microbatches {flights} are in flight")
        self._updating = True
        self._flights.append((microbatch.id, []))

    def _check_segment(self, segment: Segment) -> Life | None:
        """Check a request's share; returns the request when it gets a token of this microbatch."""
        lives = self._live.get(segment.rid)
        if not lives:
            raise Violation(f"{segment.rid} is computed although it has ended")
        life, end = lives[0], segment.start + len(segment.token_ids)
        if segment.sampling is not None:
            life.decoding = False
            self._check_turn(life)
        elif segment.start != life.planned:
            raise Violation(f"{segment.rid} goes on at position {segment.start}, it was computed up to {life.planned}")
        if end > self._limits.context_length:
            raise Violation(
                f"{segment.rid} is computed to position {end}, context_length is {self._limits.context_length}"
            )
        if life.emitting:
            raise Violation(f"{segment.rid} is computed while its last token is still in flight")
        if end > len(life.message.prompt_ids) + len(life.tokens):
            raise Violation(
                f"{segment.rid} is computed to position {end}, beyond its prompt and its {len(life.tokens)} tokens"
            )
        life.planned = end
        if not segment.emits:
            return None
        life.emitting += 1
        return life

    def _check_turn(self, life: Life) -> None:
        """A request starts: the oldest that still waits for its first start was passed over, but not for ever."""
        life.started = True
        if policy_named(self._limits.schedule_policy).rank is Rank.PRIORITY:
            return  # It bounds the longest wait alone, which is seen only from the books.
        head = next((lives[0] for lives in self._live.values() if not lives[0].started), None)
        if head is None or self.lives.index(head) > self.lives.index(life):
            return
        head.passed += 1
        if head.passed > OVERTAKEN_LIMIT_REQUESTS:
            raise Violation(f"{head.message.rid} starves: {head.passed} requests got past it")
