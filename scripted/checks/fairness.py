"""Who may wait and who goes first: order, overtaking, turns of decodes, their spread over the stages.

Looks at the books after each step, once the account of clients has confirmed them. Room, order and counts are computed
here, because the engine's own predicates may be what is wrong.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.limits import Limits
from engine.memory import KVMemory
from engine.plan import ForwardMode, Microbatch
from engine.scheduler import Request, Scheduler, StepResult
from engine.scheduler.planner import ADMISSION_TRIES_LIMIT_REQUESTS
from engine.scheduler.policy import OVERTAKEN_LIMIT_REQUESTS, Rank, policy_named
from scripted.checks.client_account import ClientAccount
from scripted.subject.violation import Violation

__all__ = ["Fairness"]


class Fairness:
    """The checks of one engine, from its first step on. Requests are kept by their order of arrival."""

    def __init__(self, limits: Limits, clients: ClientAccount) -> None:
        self._limits = limits
        self._clients = clients
        self._retractions = 0
        # How often each waiting request was sent back, as of the last look, and whether a pause still sends some back.
        self._sent_back: dict[int, int] = {}
        self._pausing = False
        self._rank = policy_named(limits.schedule_policy).rank
        # How many later starts count against the bound of each request that waits, at least and at most. A step that
        # sends requests back does not show whether they waited when others started.
        self._overtaken: dict[int, tuple[int, int]] = {}
        # The microbatch of each running request's last decode.
        self._decoded: dict[int, int] = {}

    def check(self, result: StepResult, scheduler: Scheduler) -> None:
        """After a step. Raises Violation."""
        books, microbatch = scheduler.books, result.microbatch
        retracted = scheduler.counters.retractions != self._retractions
        victims = self._victims(scheduler) if retracted else []
        if retracted:
            self._check_victims(victims, result, scheduler)
        if microbatch is not None:
            if not retracted:
                self._check_spread(microbatch, len(books.running))
            self._check_turns(microbatch, scheduler)
        started = [] if microbatch is None else self._started(microbatch, scheduler)
        if books.waiting and not retracted:
            if started and microbatch is not None:
                self._check_order(started, microbatch, scheduler)
            if self._could_start(result, scheduler):
                self._check_queue_moves(scheduler)
        if started:
            self._note_overtaken(started, scheduler, certain=not retracted)
        self._pausing = books.paused is not None or bool(books.retracting)

    # -- decodes --

    def _check_spread(self, microbatch: Microbatch, running: int) -> None:
        """Decodes are spread over the stages, so that none idles while another computes one big batch."""
        stages = self._limits.pp_size
        if microbatch.mode is ForwardMode.DECODE and len(microbatch.segments) > -(-running // stages):
            raise Violation(
                f"{len(microbatch.segments)} of {running} running requests are in one microbatch of {stages} stages"
            )

    def _check_turns(self, microbatch: Microbatch, scheduler: Scheduler) -> None:
        """Of the running requests that are in no microbatch, those decode first whose last decode is longest ago."""
        running, decoded = scheduler.books.running, self._decoded
        decodes = [one for rid in microbatch.rids if (one := running.get(rid)) is not None]
        newest = max([decoded.get(one.arrival, -1) for one in decodes], default=-1)
        for other in running.values():
            before = decoded.get(other.arrival)
            if before is not None and before < newest and not other.in_flight:
                raise Violation(f"{other.rid} last decoded in microbatch {before}, but others since {newest} go first")
        for one in decodes:
            decoded[one.arrival] = microbatch.id

    # -- who gives way --

    def _victims(self, scheduler: Scheduler) -> list[Request]:
        """The requests that were sent back in this step. Once back, they decode again in the order of their return."""
        books, before = scheduler.books, self._sent_back
        self._retractions = scheduler.counters.retractions
        victims = [one for one in books.waiting if one.retractions > before.get(one.arrival, 0)]
        before.update({one.arrival: one.retractions for one in victims})
        here = {request.arrival for request in books.running.values()}
        for arrival in [arrival for arrival in self._decoded if arrival not in here]:
            del self._decoded[arrival]
        return victims

    def _check_victims(self, victims: Sequence[Request], result: StepResult, scheduler: Scheduler) -> None:
        """When memory runs out, the request that gives way has the lowest priority and, among those, arrived last."""
        if self._pausing or scheduler.books.paused is not None:
            return
        here = result.microbatch.rids if result.microbatch is not None else ()
        for victim in victims:
            order = self._priority(victim), -victim.arrival
            for other in scheduler.books.running.values():
                idle = other.in_flight == (1 if other.rid in here else 0)
                if idle and (self._priority(other), -other.arrival) < order:
                    raise Violation(f"{victim.rid} gave way to {other.rid}, which is less urgent or came later")

    # -- who starts --

    def _started(self, microbatch: Microbatch, scheduler: Scheduler) -> list[Request]:
        """The requests that start with this microbatch, in the order in which they were admitted."""
        rids = [one.rid for one in microbatch.segments if one.sampling is not None]
        return [request for rid in rids if (request := scheduler.find_request(rid)) is not None]

    def _check_order(self, started: Sequence[Request], microbatch: Microbatch, scheduler: Scheduler) -> None:
        """The first to start is the first by the policy among those that fit."""
        if self._rank is Rank.ARRIVAL:
            return
        first = next(one.start for one in microbatch.segments if one.sampling is not None)
        for other in _queue(scheduler):
            later = any(one.arrival > other.arrival for one in started)
            overdue = later and self._counted(other)[0] >= OVERTAKEN_LIMIT_REQUESTS
            before = overdue or self._ranks_before(other, started[0], first, scheduler.memory)
            if before and self._fits(other, scheduler):
                what = f"{other.rid} fits and is first by the policy's {self._rank}"
                raise Violation(f"{what}, but {started[0].rid} is started")

    def _ranks_before(self, other: Request, started: Request, cached_tokens: int, memory: KVMemory) -> bool:
        """Unless the request that started had been overtaken as often as it may be."""
        if self._counted(started)[1] >= OVERTAKEN_LIMIT_REQUESTS:
            return False
        if self._rank is Rank.PRIORITY:
            return self._priority(other) > self._priority(started)
        return _cached_tokens(memory, other.ids, self._limits.page_size) > cached_tokens

    def _note_overtaken(self, started: Sequence[Request], scheduler: Scheduler, *, certain: bool) -> None:
        """Count each start against the earlier requests that still wait. None is overtaken for ever."""
        queue = sorted({*_queue(scheduler), *started}, key=lambda request: request.arrival)
        for one in started:
            queue.remove(one)
            self._overtaken.pop(one.arrival, None)
            # By priority the bound protects the longest wait alone.
            for other in queue[:1] if self._rank is Rank.PRIORITY else queue:
                if other.arrival > one.arrival:
                    break
                least, most = self._counted(other)
                self._overtaken[other.arrival] = least + certain, most + 1
                if least + certain > OVERTAKEN_LIMIT_REQUESTS:
                    raise Violation(f"{other.rid} starves: {least + certain} requests got past it")

    def _counted(self, request: Request) -> tuple[int, int]:
        return self._overtaken.get(request.arrival, (0, 0))

    # -- who waits --

    def _could_start(self, result: StepResult, scheduler: Scheduler) -> bool:
        """Whether this step had a slot in the pipeline and did not use it for a prompt."""
        if result.microbatch is not None:
            return result.microbatch.mode is ForwardMode.DECODE
        return len(scheduler.books.in_flight) < self._limits.depth

    def _check_queue_moves(self, scheduler: Scheduler) -> None:
        """No request waits that would fit, unless it waits for one that was overtaken as often as it may be."""
        books, memory = scheduler.books, scheduler.memory
        if (
            not memory.rows.free
            or books.paused is not None
            or books.update is not None
            or scheduler.failure is not None
        ):
            return
        if books.chunked is not None or any(
            self._counted(one)[1] >= OVERTAKEN_LIMIT_REQUESTS for one in _queue(scheduler)
        ):
            return
        for request in _queue(scheduler)[:ADMISSION_TRIES_LIMIT_REQUESTS]:
            if self._fits(request, scheduler):
                raise Violation(f"{request.rid} fits and waits after {books.waiting[0].rid}, but is not started")

    def _fits(self, request: Request, scheduler: Scheduler) -> bool:
        """Whether all its tokens fit with a page to spare for each that runs, whatever of its prefix is cached."""
        memory, spare = scheduler.memory, len(scheduler.books.running)
        need = -(-len(request.ids) // self._limits.page_size)
        free = memory.pages.free + sum([len(node.pages) for node in memory.tree.nodes() if not node.lock_ref])
        if need + spare > free:
            return False
        windows = memory.sliding_window
        return windows is None or min(need, self._limits.row_window_pages) + spare <= windows.available_pages

    def _priority(self, request: Request) -> int:
        """What its client asked for."""
        life = self._clients.live.get(request.rid)
        return request.priority if life is None else life.message.priority


def _queue(scheduler: Scheduler) -> list[Request]:
    """The requests that wait for memory alone, and not for their grammar."""
    return [one for one in scheduler.books.waiting if one.grammar is None or one.grammar.is_ready]


def _cached_tokens(memory: KVMemory, ids: Sequence[int], size: int) -> int:
    """Looked up page by page, because the tree's own search may be what is wrong."""
    node, at = memory.tree.root, 0
    usable = tuple(ids[:-1])
    while (child := node.children.get(usable[at : at + size])) is not None:
        inside = 0
        while inside < len(child.tokens) and child.tokens[inside : inside + size] == usable[at : at + size]:
            inside, at = inside + size, at + size
        if inside < len(child.tokens):
            break
        node = child
    return at
