"""The state ledger: an account of requests, replies, rows and pages that is kept apart from the engine's own books.

Fed only by what crosses the gate (events, plans, replies), so it does not believe what the engine says of itself.
After each step it checks what the engine did and compares its counts with the books.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, Final, NamedTuple

import msgspec

from engine.errors import IntegrityError
from engine.limits import Limits
from engine.memory import PageState, SlidingWindowPool
from engine.messages import (
    Abort,
    AbortAll,
    CallAnswer,
    Completion,
    Event,
    FinishReason,
    FlushCache,
    Generate,
    PauseGeneration,
    PauseMode,
    PipelineFailed,
    Refusal,
    RefusalKind,
    Reply,
    TokenOutput,
    UpdateWeights,
)
from engine.plan import ForwardMode, Microbatch, Segment
from engine.scheduler import Place, Scheduler, StepResult
from scripted.checks.page_account import PageAccount, Tenancy

__all__ = ["Ledger"]

_ABORT: Final = FinishReason.ABORT
_ERROR: Final = FinishReason.ERROR


class _Life:
    """One request, from its ``Generate`` to its terminal reply."""

    __slots__ = ("ended", "ids", "limit", "prompt_tokens", "rid", "running", "stop_ids", "tenancy")

    def __init__(self, message: Generate, limits: Limits) -> None:
        self.rid = message.rid
        self.ids = list(message.prompt_ids)
        self.prompt_tokens = len(self.ids)
        self.limit = min(len(self.ids) + message.sampling.max_new_tokens, limits.context_length)
        self.stop_ids = frozenset(message.sampling.stop_token_ids)
        if not message.sampling.ignore_eos:
            self.stop_ids |= frozenset(limits.eos_token_ids)
        self.tenancy: Tenancy | None = None
        self.running = False
        self.ended = False


class _Told(NamedTuple):
    """What a client is told of one step: new tokens, how it ended, the counts of its prompt's and of all its tokens."""

    rid: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int


class _Flight(msgspec.Struct, frozen=True, gc=False):
    """A microbatch in flight, with the life and the tenancy of each of its segments."""

    id: int
    work: tuple[tuple[Segment, _Life, Tenancy], ...]


class Ledger:
    """Made for an engine that is as good as new. ``follow`` takes each step, ``compare`` the books after it."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._pages = PageAccount(limits)
        self._live: dict[str, _Life] = {}
        self._partial: _Life | None = None
        self._flights: deque[_Flight] = deque()
        self._launched = self._ended = self._aborted = self._retracted = 0
        self._started = self._turned_away = self._prompt_tokens = self._generated_tokens = 0
        self._flushes: dict[str, bool] = {}
        # The update that is asked for and not launched, or launched and not back.
        self._asked_update = False
        self._update: int | None = None
        self._expected: list[_Told] = []
        self._refused: list[Refusal] = []
        self._told_pages: tuple[int, ...] = ()
        self._told_window_pages: tuple[int, ...] = ()
        self._handlers: dict[type, Callable[[Any], None]] = {
            Completion: self._on_completion,
            PipelineFailed: self._on_pipeline_failed,
            Generate: self._on_generate,
            Abort: self._on_abort,
            AbortAll: self._on_abort_all,
            PauseGeneration: self._on_pause,
            FlushCache: self._on_flush,
            UpdateWeights: self._on_update,
        }

    def follow(self, events: tuple[Event, ...], result: StepResult) -> None:
        """Account for one step. Raises IntegrityError for a reply or a plan that the events do not account for."""
        replies = result.replies
        self._told_pages = self._told_window_pages = ()
        self._refused = [reply for reply in replies if type(reply) is Refusal]
        for event in events:
            handler = self._handlers.get(type(event))
            if handler is not None:
                handler(event)
        if self._refused:
            raise IntegrityError(f"{self._refused[0]} answers no request of this step that could be refused so")
        if replies or self._expected:
            self._check_outputs(replies)
        if result.microbatch is not None:
            self._on_launch(result.microbatch)

    def compare(self, scheduler: Scheduler) -> None:
        """Compare the account with the engine's books. Raises IntegrityError that names what differs."""
        if scheduler.counters.retractions != self._retracted:
            self._take_note_of_retractions(scheduler)
        ours, theirs = self._counts(), _counts_of(scheduler)
        if ours != theirs:
            raise IntegrityError("the ledger and the engine's books differ: " + _differences(ours, theirs))
        self._compare_pages(scheduler)

    def _counts(self) -> tuple[object, ...]:
        lives = self._live.values()
        return (
            self._live.keys(),
            sum([life.tenancy is None for life in lives]),
            self._partial.rid if self._partial is not None else None,
            {life.rid for life in lives if life.running},
            tuple([flight.id for flight in self._flights]),
            len(self._pages.rows),
            self._launched,
            self._retracted,
            self._started,
            self._turned_away,
            self._ended - self._aborted,
            self._aborted,
            self._prompt_tokens,
            self._generated_tokens,
            not self._flights and not self._pages.rows,
        )

    def _compare_pages(self, scheduler: Scheduler) -> None:
        """Pages that are owned were told to the stages, and what the stages were told just now is owned."""
        memory = scheduler.memory
        locked = 0 if scheduler.pressure.pins else memory.tree.locked_pages
        owned, told = memory.pages.held + locked, self._pages.in_use
        # A page that was swapped for the tree's own, which its tenant was not told of yet, may be another's by now.
        if owned > told and owned > told + self._pages.lost:
            raise IntegrityError(f"the engine holds or locks {owned} pages, the stages were told to use only {told}")
        free = [page for page in self._told_pages if not memory.pages.state(page)]
        if free:
            raise IntegrityError(f"the last microbatch uses pages {free}, which the engine books as free")
        if memory.sliding_window is not None:
            self._compare_window_pages(memory.sliding_window)

    def _compare_window_pages(self, windows: SlidingWindowPool) -> None:
        """Window pages that were told just now are owned, and each is told once unless the tree shares it."""
        told = self._told_window_pages
        free = [page for page in told if not windows.pages.state(page)]
        twice = [page for page in told if told.count(page) > 1 and windows.pages.state(page) is not PageState.CACHED]
        if free or twice:
            raise IntegrityError(f"the last microbatch uses window pages {free or twice}, booked as free or another's")

    # -- events --

    def _on_generate(self, message: Generate) -> None:
        refusal = self._refusal_of(message.rid)
        if refusal is not None:
            self._refused.remove(refusal)
            self._turned_away += 1
            return
        if message.rid in self._live:
            raise IntegrityError(f"{message.rid} was admitted while another request of this rid is alive")
        life = self._live[message.rid] = _Life(message, self._limits)
        self._started += 1
        self._prompt_tokens += life.prompt_tokens

    def _refusal_of(self, rid: str) -> Refusal | None:
        """The refusal that answers a request of this rid which arrives now."""
        for refusal in self._refused:
            if refusal.rid == rid and (refusal.kind is not RefusalKind.DUPLICATE or rid in self._live):
                return refusal
        return None

    def _on_abort(self, abort: Abort) -> None:
        life = self._live.get(abort.rid)
        if life is not None:
            self._end(life, abort.finish_reason)

    def _on_abort_all(self, _: AbortAll) -> None:
        for life in list(self._live.values()):
            self._end(life, _ABORT)

    def _on_pause(self, pause: PauseGeneration) -> None:
        if pause.mode is PauseMode.ABORT:
            self._on_abort_all(AbortAll())
        elif pause.mode is PauseMode.RETRACT:
            self._partial = None
            for life in self._live.values():
                life.running = False
                if life.tenancy is not None and not life.tenancy.leaving:
                    self._pages.leave(life.tenancy)
                    self._note_if_retracted(life)

    def _on_update(self, update: UpdateWeights) -> None:
        del update
        self._asked_update = self._asked_update or not (self._flights or self._pages.rows)

    def _on_flush(self, flush: FlushCache) -> None:
        quiescent = not (self._flights or self._pages.rows or self._asked_update)
        self._flushes[flush.call_id] = quiescent
        if quiescent:
            self._pages.flush()

    def _on_pipeline_failed(self, failed: PipelineFailed) -> None:
        del failed
        self._update, self._asked_update = None, False
        for alive in list(self._live.values()):
            self._end(alive, _ERROR)
        while self._flights:
            for segment, _, tenancy in self._flights.popleft().work:
                self._pages.land(segment, tenancy, confirmed=False)

    def _on_completion(self, completion: Completion) -> None:
        if not self._flights or completion.microbatch_id < self._flights[0].id:
            return  # It was given up when the pipeline failed.
        flight = self._flights.popleft()
        if flight.id != completion.microbatch_id:
            raise IntegrityError(f"microbatch {completion.microbatch_id} came back, {flight.id} was launched first")
        tokens = iter(completion.token_ids)
        if flight.id == self._update:
            self._update = None
            if completion.error is None:
                self._pages.flush()
        for segment, life, tenancy in flight.work:
            if completion.error is not None and not life.ended:
                self._end(life, _ERROR)
            self._pages.land(segment, tenancy, confirmed=not life.ended)
            if segment.emits and completion.error is None:
                self._on_token(life, next(tokens), tenancy)
            # After the token, because a request on its way back to the queue may end with it.
            self._note_if_retracted(life)

    def _on_token(self, life: _Life, token: int, tenancy: Tenancy) -> None:
        if life.ended:
            return
        life.ids.append(token)
        self._generated_tokens += 1
        life.running = not tenancy.leaving
        if token in life.stop_ids:
            self._end(life, FinishReason.STOP, token)
        elif len(life.ids) >= life.limit:
            self._end(life, FinishReason.LENGTH, token)
        else:
            self._expect(life, (token,), None)

    def _end(self, life: _Life, reason: FinishReason, *tokens: int) -> None:
        self._expect(life, tokens, reason)
        self._ended += 1
        self._aborted += reason is _ABORT
        life.ended, life.running = True, False
        del self._live[life.rid]
        if self._partial is life:
            self._partial = None
        if life.tenancy is not None and not life.tenancy.leaving:
            self._pages.leave(life.tenancy)

    def _expect(self, life: _Life, tokens: tuple[int, ...], reason: FinishReason | None) -> None:
        prompt = life.prompt_tokens
        self._expected.append(_Told(life.rid, tokens, reason, prompt, len(life.ids) - prompt))

    # -- replies --

    def _check_outputs(self, replies: tuple[Reply, ...]) -> None:
        """Every token and every end is told once, as the events of the step say, and nothing else is."""
        told = [
            _Told(r.rid, r.token_ids, r.finish_reason, r.prompt_tokens, r.completion_tokens)
            for r in replies
            if isinstance(r, TokenOutput)
        ]
        if sorted(told, key=_rid_of) != sorted(self._expected, key=_rid_of):
            raise IntegrityError(f"the step's events account for the outputs {self._expected}, but told is {told}")
        self._expected.clear()
        for reply in replies:
            if isinstance(reply, CallAnswer) and reply.call_id in self._flushes:
                self._check_flush(reply, asked_quiescent=self._flushes.pop(reply.call_id))

    def _check_flush(self, answer: CallAnswer, *, asked_quiescent: bool) -> None:
        quiescent = not self._flights and not self._pages.rows
        if answer.ok and not (asked_quiescent or quiescent):
            flights = [flight.id for flight in self._flights]
            raise IntegrityError(
                f"the cache was flushed while microbatches {flights} are in flight and "
                f"{list(self._pages.rows.values())} own memory"
            )
        if asked_quiescent and not answer.ok:
            raise IntegrityError(f"a flush was refused while nothing owned memory: {answer.message}")
        if answer.ok:
            self._pages.flush()

    # -- plans --

    def _on_launch(self, microbatch: Microbatch) -> None:
        if microbatch.mode is ForwardMode.UPDATE:
            self._check_update(microbatch)
        elif not microbatch.is_control:
            self._check_size(microbatch)
        work = tuple([(segment, *self._tenant_of(segment)) for segment in microbatch.segments])
        self._pages.launch([(segment, tenancy) for segment, _, tenancy in work])
        for segment, life, tenancy in work:
            self._check_tokens(segment, life, tenancy)
        self._flights.append(_Flight(microbatch.id, work))
        self._launched += 1
        self._told_pages = tuple([page for segment in microbatch.segments for page in segment.pages])
        self._told_window_pages = tuple([p for segment in microbatch.segments for p in segment.window_pages if p >= 0])

    def _check_update(self, microbatch: Microbatch) -> None:
        if self._flights or self._pages.rows:
            flights = [flight.id for flight in self._flights]
            raise IntegrityError(
                f"the weights are updated while microbatches {flights} are in flight and "
                f"{list(self._pages.rows.values())} own memory"
            )
        self._update, self._asked_update = microbatch.id, False

    def _check_size(self, microbatch: Microbatch) -> None:
        limits = self._limits
        most = limits.rows if microbatch.mode is ForwardMode.DECODE else limits.prefill_budget_tokens
        rids = microbatch.rids
        if microbatch.id != self._launched or not 1 <= microbatch.tokens <= most or len(set(rids)) != len(rids):
            raise IntegrityError(
                f"microbatch {microbatch.id} has {microbatch.tokens} tokens of {rids}; "
                f"due is number {self._launched}, with 1 to {most} tokens, and each request once"
            )
        if len(self._flights) >= limits.depth:
            raise IntegrityError(f"microbatch {microbatch.id} is launched behind {len(self._flights)} in flight")

    def _tenant_of(self, segment: Segment) -> tuple[_Life, Tenancy]:
        """The request of a segment and its stay in the segment's row; a new one when the segment brings a spec."""
        life = self._live.get(segment.rid)
        if life is None:
            raise IntegrityError(f"a microbatch computes {segment.rid}, which is not alive")
        tenancy = life.tenancy
        if segment.sampling is None:
            if tenancy is None or tenancy.leaving or tenancy.row != segment.row:
                raise IntegrityError(f"{segment.rid} goes on in row {segment.row}, but its row is {tenancy}")
            return life, tenancy
        before = self._pages.rows.get(segment.row)
        for old in (tenancy, before):
            if old is not None and self._pages.rows.get(old.row) is old:
                self._retract(old)
        life.tenancy = tenancy = Tenancy(life.rid, segment.row, life.ids, segment.start)
        self._pages.open(tenancy)
        return life, tenancy

    def _check_tokens(self, segment: Segment, life: _Life, tenancy: Tenancy) -> None:
        """Positions without a gap, the request's own tokens, and at most one request that is partly computed."""
        start, end, known = segment.start, segment.start + len(segment.token_ids), len(life.ids)
        if start != tenancy.planned or tuple(life.ids[start:end]) != segment.token_ids:
            raise IntegrityError(f"{tenancy} is due at position {tenancy.planned} of {life.ids}, planned is {segment}")
        if segment.emits is not (end == known):
            raise IntegrityError(f"{tenancy} has {known} tokens: {start} to {end - 1} emit one is {end == known}")
        tenancy.planned = end
        if end < known:
            if self._partial is not None and self._partial is not life:
                raise IntegrityError(f"{tenancy} is split while {self._partial.rid} is partly computed")
            self._partial = life
        elif self._partial is life:
            self._partial = None

    # -- retractions that no event asked for --

    def _take_note_of_retractions(self, scheduler: Scheduler) -> None:
        """The engine says that it retracted somebody: it may, whom it could."""
        for tenancy in list(self._pages.rows.values()):
            request = scheduler.books.requests.get(tenancy.rid)
            if request is not None and request.place is Place.WAITING:
                self._retract(tenancy)

    def _retract(self, tenancy: Tenancy) -> None:
        life = self._live.get(tenancy.rid)
        if life is None or life.tenancy is not tenancy or tenancy.in_flight or not life.running:
            raise IntegrityError(f"{tenancy} lost its memory, but it is in flight or was not decoding")
        life.running = False
        self._pages.leave(tenancy)
        self._note_if_retracted(life)

    def _note_if_retracted(self, life: _Life) -> None:
        tenancy = life.tenancy
        if tenancy is not None and tenancy.leaving and not tenancy.in_flight and not life.ended:
            life.tenancy = None
            self._retracted += 1


_NAMES: Final = (
    "alive", "waiting", "chunked", "running", "in flight", "rows taken", "launched", "retractions",
    "started", "refused", "finished", "aborted", "prompt tokens", "generated tokens", "quiescent",
)  # fmt: skip


def _rid_of(told: _Told) -> str:
    return told.rid


def _counts_of(scheduler: Scheduler) -> tuple[object, ...]:
    books, counters, rows = scheduler.books, scheduler.counters, scheduler.memory.rows
    return (
        books.requests.keys(),
        len(books.waiting),
        books.chunked.rid if books.chunked is not None else None,
        books.running.keys(),
        books.in_flight_ids(),
        rows.total - rows.free - rows.reserved,
        counters.forward_ct,
        counters.retractions,
        counters.requests_started,
        counters.requests_refused,
        counters.requests_finished,
        counters.requests_aborted,
        counters.prompt_tokens,
        counters.generated_tokens,
        scheduler.is_quiescent,
    )


def _differences(ours: tuple[object, ...], theirs: tuple[object, ...]) -> str:
    pairs = zip(_NAMES, ours, theirs, strict=True)
    return "; ".join(f"{name}: the ledger says {a}, the books say {b}" for name, a, b in pairs if a != b)
