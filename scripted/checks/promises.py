"""Promises of the engine that its own audit does not make: who may wait, who must not own memory, what is counted.

Looked at after each step from the live books, and never from the answers, which are the ledger's.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.messages import EngineStats, FinishReason, PauseMode
from engine.plan import ForwardMode, Microbatch
from engine.scheduler import Request, Scheduler, StepResult
from engine.scheduler.planner import ADMISSION_TRIES_LIMIT_REQUESTS
from engine.scheduler.policy import OVERTAKEN_LIMIT_REQUESTS, Rank
from scripted.checks.clients import Ledger, Violation

__all__ = ["Promises"]


class Promises:
    """Checks over one scheduler."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._retractions = 0
        # How often each request was sent back, as of the last look, and whether a pause is still sending some back.
        self._sent_back: dict[str, int] = {}
        self._pausing = False
        # How many later starts count against the bound of each request that waits, at least and at most, by order of
        # arrival. A step that sends requests back does not show whether they waited when others started.
        self._overtaken: dict[int, tuple[int, int]] = {}
        # The microbatch of each running request's last decode, by order of arrival.
        self._decoded: dict[int, int] = {}

    def check(self, result: StepResult, *, missing: bool) -> None:
        """After a step; ``missing`` says that results are still to come. Raises Violation."""
        books, memory = self._scheduler.books, self._scheduler.memory
        if result.deadline is not None and result.deadline <= self._scheduler.now:
            raise Violation(f"a flush waits beyond its deadline: it is {self._scheduler.now}, it was {result.deadline}")
        if (
            books.paused in (PauseMode.RETRACT, PauseMode.ABORT)
            and not missing
            and memory.rows.free + memory.rows.reserved != memory.rows.total
        ):
            raise Violation(
                f"generation is paused ({books.paused}), nothing is in flight, but somebody owns a row: {books.live()}"
            )
        self._check_leases()
        retracted = self._scheduler.counters.retractions != self._retractions
        self._retractions = self._scheduler.counters.retractions
        if retracted:
            self._check_victims(result)
        elif result.microbatch is not None:
            self._check_spread(result.microbatch)
            self._check_turns(result.microbatch)
        if books.waiting and not retracted:
            self._check_queue()
            if result.microbatch is not None:
                self._check_order(result.microbatch)
            if self._could_start(result):
                self._check_nobody_is_held_up()
        if result.microbatch is not None:
            self._note_overtaken(self._started(result.microbatch), certain=not retracted)
        self._pausing = books.paused is not None or bool(books.retracting)
        if retracted:
            # Who was sent back decodes anew, in the order in which they come back.
            here = {request.arrival for request in books.running.values()}
            self._decoded = {arrival: number for arrival, number in self._decoded.items() if arrival in here}

    def check_hits(self) -> None:
        """When all have ended: a prefix is hit when a prompt is confirmed and when its request ends, never by parts."""
        counters = self._scheduler.counters
        most = 2 * counters.requests_started + counters.retractions
        for node in self._scheduler.memory.tree.nodes():
            if node.hit_count > most:
                raise Violation(f"{node} has {node.hit_count} hits, but {most} at most were earned")

    def check_counters(self, ledger: Ledger) -> None:
        """When all have ended: the engine's totals are those of what its clients asked for and were told."""
        lives = ledger.lives
        stats = self._scheduler.stats() if ledger.stats is None else ledger.stats
        started = [life for life in lives if not life.refused]
        told = {
            "requests_started": len(started),
            "requests_refused": len(lives) - len(started),
            "requests_aborted": sum(life.end is FinishReason.ABORT for life in started),
            "requests_finished": sum(life.end is not FinishReason.ABORT for life in started),
            "prompt_tokens": sum(len(life.message.prompt_ids) for life in started),
            "generated_tokens": sum(len(life.tokens) for life in started),
            "forward_ct": ledger.launched,
            "weights_version": ledger.updated,
        }
        for name, count in told.items():
            if getattr(stats, name) != count:
                raise Violation(f"{name} is {getattr(stats, name)}, but the clients' count is {count}")

    def check_idle_stats(self, stats: EngineStats) -> None:
        """What an idle and flushed engine says of itself: everything is free, nothing is going on."""
        limits = self._scheduler.limits
        idle = {
            "step": self._scheduler.step_number,
            "pages_free": limits.total_pages,
            "pages_total": limits.total_pages,
            "rows_free": limits.rows,
            "rows_total": limits.rows,
            "page_size": limits.page_size,
            "retractions": self._retractions,
            **dict.fromkeys(("waiting", "chunked", "running", "in_flight", "pages_cached", "pages_held"), 0),
        }
        for name, value in idle.items():
            if getattr(stats, name) != value:
                raise Violation(f"an idle engine says {name} {getattr(stats, name)}, but it is {value}")

    def _check_leases(self) -> None:
        """Nobody holds a page for tokens that are not planned; what is confirmed of a prompt is there for others."""
        books, memory = self._scheduler.books, self._scheduler.memory
        page_size, caching = memory.pages.page_size, self._scheduler.limits.radix_cache
        for request in books.running.values():
            self._check_room(request)
            assert request.lease is not None
            if caching and request.lease.cached_pages < request.prefill_tokens // page_size:
                raise Violation(f"{request.rid} runs, but the tree has not all of its prompt: {request.lease}")
        chunked = books.chunked
        if chunked is None or chunked.lease is None:
            return
        self._check_room(chunked)
        confirmed = chunked.planned_tokens if not chunked.in_flight else 0
        if caching and chunked.lease.cached_pages < confirmed // page_size:
            raise Violation(f"{confirmed} tokens of {chunked.rid} are confirmed, but not in the tree: {chunked.lease}")

    def _check_room(self, request: Request) -> None:
        assert request.lease is not None, f"{request} is computed without memory"
        pages, most = len(request.lease.pages), -(-request.planned_tokens // self._scheduler.limits.page_size)
        if pages > most:
            raise Violation(f"{request.rid} has {pages} pages for {request.planned_tokens} tokens, {most} are enough")

    def _cached_tokens(self, ids: Sequence[int]) -> int:
        """Looked up page by page, and not by the tree's own search, which may be what is wrong."""
        node, at, size = self._scheduler.memory.tree.root, 0, self._scheduler.limits.page_size
        usable = tuple(ids[:-1])
        while (child := node.children.get(usable[at : at + size])) is not None:
            inside = 0
            while inside < len(child.tokens) and child.tokens[inside : inside + size] == usable[at : at + size]:
                inside, at = inside + size, at + size
            if inside < len(child.tokens):
                break
            node = child
        return at

    def _check_victims(self, result: StepResult) -> None:
        """Who is sent back for want of memory is the latest to arrive of those that could have been."""
        books, before = self._scheduler.books, self._sent_back
        victims = [one for one in books.waiting if one.retractions > before.get(one.rid, 0)]
        before.update({one.rid: one.retractions for one in books.waiting})
        if self._pausing or books.paused is not None:
            return
        here = result.microbatch.rids if result.microbatch is not None else ()
        for victim in victims:
            for other in books.running.values():
                idle = other.in_flight == (1 if other.rid in here else 0)
                if idle and other.priority == victim.priority and other.arrival > victim.arrival:
                    raise Violation(f"{victim.rid} gave way to {other.rid}, which came later")

    def _check_spread(self, microbatch: Microbatch) -> None:
        """Decodes are spread over the stages, so that none idles behind one big batch."""
        running, stages = len(self._scheduler.books.running), self._scheduler.limits.pp_size
        most = -(-running // stages)
        if microbatch.mode is ForwardMode.DECODE and len(microbatch.segments) > most:
            raise Violation(
                f"{len(microbatch.segments)} of {running} running requests are in one microbatch of {stages} stages"
            )

    def _check_turns(self, microbatch: Microbatch) -> None:
        """Of the running requests that are in no microbatch, those decode first whose last decode is longest ago."""
        running = self._scheduler.books.running
        decodes = [one for rid in microbatch.rids if (one := running.get(rid)) is not None]
        newest = max((self._decoded.get(one.arrival, -1) for one in decodes), default=-1)
        for other in running.values():
            before = self._decoded.get(other.arrival)
            if before is not None and before < newest and not other.in_flight:
                raise Violation(f"{other.rid} last decoded in microbatch {before}, but others since {newest} go first")
        for one in decodes:
            self._decoded[one.arrival] = microbatch.id

    def _started(self, microbatch: Microbatch) -> list[Request]:
        """The requests that start with this microbatch, in the order in which they were admitted."""
        rids = [one.rid for one in microbatch.segments if one.sampling is not None]
        return [request for rid in rids if (request := self._scheduler.find_request(rid)) is not None]

    def _check_order(self, microbatch: Microbatch) -> None:
        """The first to start is the first by the policy among those that fit."""
        rank, started = self._scheduler.planner.policy.rank, self._started(microbatch)
        if not started or rank is Rank.ARRIVAL:
            return
        first = next((one.start for one in microbatch.segments if one.sampling is not None), 0)
        memory, running = self._scheduler.memory, len(self._scheduler.books.running)
        for other in self._scheduler.books.waiting:
            before = self._is_overdue(other, started) or self._ranks_before(rank, other, started[0], first)
            if before and memory.has_room(len(other.ids), spare_pages=running):
                raise Violation(
                    f"{other.rid} fits and is first by the policy's {rank}, but {started[0].rid} is started"
                )

    def _ranks_before(self, rank: Rank, other: Request, started: Request, cached_tokens: int) -> bool:
        """Unless what was started had been overtaken as often as it may be."""
        if self._overtaken.get(started.arrival, (0, 0))[1] >= OVERTAKEN_LIMIT_REQUESTS:
            return False
        if rank is Rank.PRIORITY:
            return other.priority > started.priority
        return self._cached_tokens(other.ids) > cached_tokens

    def _is_overdue(self, other: Request, started: Sequence[Request]) -> bool:
        """Whether it was overtaken as often as it may be, and is again."""
        later = any(one.arrival > other.arrival for one in started)
        return later and self._overtaken.get(other.arrival, (0, 0))[0] >= OVERTAKEN_LIMIT_REQUESTS

    def _note_overtaken(self, started: Sequence[Request], *, certain: bool) -> None:
        queue = sorted({*self._scheduler.books.waiting, *started}, key=lambda request: request.arrival)
        for one in started:
            queue.remove(one)
            self._overtaken.pop(one.arrival, None)
            for other in self._scheduler.planner.policy.overtaken_by(one, queue):
                least, most = self._overtaken.get(other.arrival, (0, 0))
                self._overtaken[other.arrival] = least + certain, most + 1

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
            or books.update is not None
            or books.chunked is not None
            or scheduler.failure is not None
        ):
            return
        if any(scheduler.planner.policy.is_overdue(request) for request in books.waiting):
            return
        for request in books.waiting[:ADMISSION_TRIES_LIMIT_REQUESTS]:
            if memory.has_room(len(request.ids), spare_pages=len(books.running)):
                raise Violation(f"{request.rid} fits and waits behind {books.waiting[0].rid}, but nobody starts it")
