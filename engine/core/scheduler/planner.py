"""The planner: decides what the next microbatch computes, within the token budget and the free memory.

Prefill goes before decode, or both go together. It admits from the queue, splits prompts, and retracts when decode runs
out of pages. It launches nothing and sends no replies; it moves requests between the places of the books.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from engine.core.plan import DECODE, MIXED, PREFILL, UNKNOWN_TOKEN, Segment, SegmentShare
from engine.core.scheduler.chunk_sizes import ChunkSizes
from engine.core.scheduler.core import Core
from engine.core.scheduler.request import CHUNKED, DISPATCHED, RECEIVING, RUNNING, Request
from engine.core.scheduler.shared_prompts import is_worth_waiting

# A step tries at most this many waiting requests that do not fit: each try walks the tree, and the queue may be long.
ADMISSION_TRIES_LIMIT_REQUESTS: Final = 16


class Plan:
    """A microbatch under construction. ``requests`` has the request of each segment, in the same order.

    ``budget`` bounds the tokens of its chunks, ``seats`` the number of requests; ``cost`` is the sum of the chunks'
    costs, if these are bounded.
    """

    __slots__ = ("budget", "cost", "mode", "requests", "seats", "segments", "tokens")

    def __init__(self, budget: int, seats: int) -> None:
        self.budget = budget
        self.seats = seats
        self.mode = PREFILL
        self.segments: list[Segment] = []
        self.requests: list[Request] = []
        self.tokens = 0
        self.cost = 0

    @property
    def room(self) -> int:
        """The prompt tokens that still fit."""
        return self.budget - self.tokens


class Planner:
    """Plans one microbatch at a time over the books and the memory of one scheduler."""

    def __init__(self, core: Core) -> None:
        limits = core.limits
        self._core = core
        self._limits = limits
        self._books = core.books
        self._memory = core.memory
        self._counters = core.counters
        self._policy = core.policy
        self._hooks = core.hooks
        budget, parity = limits.prefill_budget_tokens, limits.chunk_parity_tokens
        self.chunk_sizes = ChunkSizes(budget, parity, limits.page_size) if limits.dynamic_chunking else None
        # Computed once, because every step reads them.
        self._most_requests, self._most_decodes = limits.most_requests, limits.decode_budget_tokens
        self._plans_ahead = limits.async_scheduling
        # The placeholder for a token that is not known yet; without planning ahead every token is known.
        self._unknown = (UNKNOWN_TOKEN,) if limits.async_scheduling else ()

    @property
    def may_plan(self) -> bool:
        """Return whether a microbatch can be planned: awake, not paused, no update, a free slot, and work for it."""
        books = self._books
        if not books.is_awake or books.paused is not None or books.update is not None:
            return False
        if len(books.in_flight) >= self._limits.depth:
            return False
        if books.chunked is not None or books.waiting:
            return True
        if books.transferring and books.next_received() is not None:
            return True
        return bool(books.running and (self._ready() or (self._plans_ahead and self._ahead())))

    def plan(self) -> Plan | None:
        """Return the next microbatch's mode, segments and their requests; None without a slot or work."""
        if not self.may_plan:
            return None
        books, plan = self._books, Plan(self._limits.prefill_budget_tokens, self._most_requests)
        if books.chunked is not None or books.waiting or books.transferring:
            if self._limits.mixed_chunk:
                self._add_both(plan)
            else:
                self._add_prefill(plan)
        if not plan.tokens:
            plan.mode = DECODE
            self._add_decodes(plan, self._decode_share())
        return plan if plan.tokens else None

    def check_budget(self, plan: Plan) -> None:
        """Assert that a microbatch does not exceed the size for which the stages were built."""
        most = self._most_decodes if plan.mode is DECODE else self._limits.prefill_budget_tokens
        assert plan.tokens <= most, f"a {plan.mode} microbatch has {plan.tokens} tokens, the budget is {most}"
        assert len(plan.requests) <= self._most_requests, f"{plan.requests} are in one microbatch"

    def _add_both(self, plan: Plan) -> None:
        """Add decodes first, then prompts into the rest of the budget: no stream waits for a long prompt.

        Prompts always get a page of the budget, or half of a smaller budget, so that neither starves the other. A
        prompt that may not be split gets the whole budget. While requests run, a feature may bound prompts further.
        """
        budget = plan.budget
        least = max(1, min(self._limits.page_size, budget // 2)) if self._limits.chunking else budget
        decodes = len(self._choose_decodes(min(self._decode_share(), budget - least, plan.seats - 1)))
        plan.budget -= decodes
        plan.seats -= decodes
        if self._books.running:
            for feature in self._hooks.bound_prompts:
                plan.budget = feature.bound_prompts(plan.budget, decodes)
        self._add_prefill(plan)
        if plan.tokens:
            # Chosen again, because an admission may have retracted one of them.
            seats = decodes + plan.seats - len(plan.requests)
            self._add_decodes(plan, min(self._decode_share(), decodes + plan.room, seats))

    # -- prefill --

    def _add_prefill(self, plan: Plan) -> None:
        """Fill the budget with the next chunk of the partly prefilled request, then received requests, then others."""
        chunked = self._books.chunked
        if chunked is not None:
            self._add_chunk(plan, chunked)
        if self._books.transferring:
            self._add_received(plan)
        for request in self._admissions():
            if not self._may_start(request, plan):
                break
            if not self._waits_for_another(request, plan) and self._admit(request):
                self._add_chunk(plan, request)

    def _add_received(self, plan: Plan) -> None:
        """Add requests whose KV has arrived: the whole rest of each prompt, or a chunk of the first one."""
        while (request := self._books.next_received()) is not None:
            rest = request.prefill_tokens - request.planned_tokens
            if plan.tokens and (rest > plan.room or len(plan.requests) >= plan.seats):
                return
            self._books.take_out(request)
            request.place = CHUNKED
            self._books.chunked = request
            self._add_chunk(plan, request)

    def _admissions(self) -> Iterator[Request]:
        """Yield the waiting requests to try, in order. Requests that do not fit are passed over until one is overdue.

        Yields nothing while a prompt is partly prefilled.
        """
        books = self._books
        if books.chunked is not None or not (self._memory.rows.free or self._limits.priority_preemption):
            return
        policy, waiting, missed = self._policy, self._core.startable(), 0
        for request in tuple(policy.order(waiting, self._memory)):
            if self._is_held_back(request):
                if policy.is_overdue(request):
                    return
                continue
            if not self._can_take_a_row(request):
                return
            yield request
            if request.lease is None:
                missed += 1
                if missed >= ADMISSION_TRIES_LIMIT_REQUESTS or policy.is_overdue(request):
                    return
            elif books.chunked is not None or any(map(policy.is_overdue, policy.overtaken_by(request, waiting))):
                return

    def _is_held_back(self, request: Request) -> bool:
        hooks = self._hooks.holds_back
        return bool(hooks) and any(feature.holds_back(request) for feature in hooks)

    def _waits_for_another(self, request: Request, plan: Plan) -> bool:
        """Return whether another request already has its prompt on the way: launched, in this microbatch, or being
        received.

        A prompt that this engine computes itself never waits for a transfer, which may be late.
        """
        launched = (one for flight in self._books.in_flight for one in flight.requests)
        received = self._books.transferring.values() if request.may_be_received else ()
        return is_worth_waiting(request, itertools.chain(launched, plan.requests, received), self._memory)

    def _can_take_a_row(self, request: Request) -> bool:
        return self._memory.rows.free > 0 or bool(self._limits.priority_preemption and self._victims_of(request))

    def _may_start(self, request: Request, plan: Plan) -> bool:
        """Return whether the rest of the budget is worth a start: it holds the whole prompt, or at least a page."""
        tokens = len(request.ids)
        if len(plan.requests) >= plan.seats:
            return False
        if not plan.tokens or tokens <= plan.room:
            return True
        # A prompt longer than the whole budget is split even with chunking off: a retracted request can have one.
        may_split = self._limits.chunking or tokens > self._limits.prefill_budget_tokens
        return may_split and plan.room >= self._limits.page_size

    def _admit(self, request: Request) -> bool:
        """Lease memory for all of a request's tokens, leaving one page to each running request that may need one."""
        if self._limits.priority_preemption:
            self._preempt_for(request)
        spare, most = len(self._books.running), request.hit_limit_tokens
        lease = self._memory.admit(request.rid, request.ids, spare_pages=spare, hit_limit=most, kv_key=request.kv_key)
        if lease is None:
            return False
        self._books.take_out(request)
        request.lease = lease
        request.prefill_start = request.planned_tokens = len(lease.pages) * self._limits.page_size
        request.prefill_tokens = len(request.ids)
        if not request.retractions:
            # Reported and counted once: after a retraction a request finds its own pages, which is not a hit.
            request.cached_tokens = request.prefill_start
            self._counters.cached_tokens += request.cached_tokens
        request.place = CHUNKED
        for feature in self._hooks.start:
            feature.start(request)
        if request.place is CHUNKED:
            self._books.chunked = request
        request.overtaken = 0
        for other in self._policy.overtaken_by(request, self._core.startable()):
            other.overtaken += 1
        return True

    def _add_chunk(self, plan: Plan, request: Request) -> None:
        """Add the next chunk of a prompt that fits the budget, if there is memory for it.

        With its last chunk a request leaves ``chunked``. A prompt whose KV is being received gets none.
        """
        if request.place is RECEIVING:
            return
        start = request.planned_tokens
        end = start + self._part(plan, start, request.prefill_tokens - start)
        lease = request.lease
        assert lease is not None, f"{request} is being prefilled, but owns no memory"
        if not self._memory.extend(lease, end):
            return
        last = end == request.prefill_tokens
        if not (last and start == request.prefill_start):
            request.chunks_done += 1  # chunks of split prompts, tails included; a prompt in one piece has none
        if last:
            request.place = DISPATCHED
            self._books.chunked = None
        emits = last and end < request.limit_tokens
        share: SegmentShare = {}
        for feature in self._hooks.fill_prompt:
            feature.fill_prompt(request, start, end, share)
        self._add_segment(plan, request, start, end, emits=emits, share=share)

    def _part(self, plan: Plan, start: int, rest: int) -> int:
        """Return the tokens of the next chunk: all that fit, or as many as keep the stages balanced."""
        if self.chunk_sizes is None:
            return min(rest, plan.room)
        tokens = self.chunk_sizes.part(start, rest, room=plan.room, spent=plan.cost)
        plan.cost += self.chunk_sizes.cost(start, tokens)
        return tokens

    # -- decode --

    def _decode_share(self) -> int:
        """Return how many running requests go into one microbatch: they are spread so that no stage idles."""
        return min(self._most_requests, -(-len(self._books.running) // self._limits.pp_size))

    def _add_decodes(self, plan: Plan, most: int) -> None:
        """Add one token of each of up to ``most`` running requests."""
        running, before = self._books.running, plan.tokens
        # No drafts beside prompts: the budget is for prompts.
        drafting = () if before else self._hooks.draft
        for request in self._choose_decodes(most):
            # Moved to the end, so that the next microbatch takes the least recently launched requests.
            running[request.rid] = running.pop(request.rid)
            start = request.planned_tokens
            drafts: tuple[int, ...] = ()
            for feature in drafting:
                drafts = feature.draft(request, spare_pages=len(running))
            self._add_segment(plan, request, start, start + 1, emits=True, drafts=drafts, share={})
        if before and plan.tokens > before:
            plan.mode = MIXED

    def _choose_decodes(self, most: int) -> list[Request]:
        """Return running requests with room for their next token's KV: those in no microbatch first, then those planned
        ahead.
        """
        chosen: list[Request] = []
        one_waits = False
        for request in self._ready():
            if len(chosen) >= most:
                break
            # It may have been retracted to make room for another request of this microbatch.
            if request.place is RUNNING and self._make_room(request, chosen):
                chosen.append(request)
            elif request.place is RUNNING:
                one_waits = True
        # A victim in flight has to land before it can be retracted.
        if self._plans_ahead and not one_waits:
            self._choose_ahead(most, chosen)
        return chosen

    def _choose_ahead(self, most: int, chosen: list[Request]) -> None:
        for request in self._ahead():
            if len(chosen) >= most:
                break
            assert request.lease is not None, f"{request} is running, but owns no memory"
            if self._memory.extend(request.lease, request.planned_tokens + 1):
                chosen.append(request)

    def _ready(self) -> list[Request]:
        """Return the running requests that are in no microbatch, least recently launched first."""
        return [request for request in self._books.running.values() if not request.in_flight]

    def _ahead(self) -> Sequence[Request]:
        """Return the running requests that may be planned before their last token is back, least recently launched
        first.

        Empty while a waiting request could preempt them: a request in flight cannot be preempted.
        """
        if self._limits.priority_preemption and self._books.waiting:
            return ()
        return [request for request in self._books.running.values() if request.may_go_ahead]

    def _make_room(self, request: Request, chosen: list[Request]) -> bool:
        """Extend a request by one token, retracting others, latest first, until it fits; False if it does not yet.

        In that case the request itself was retracted, or the victim is in flight because it was planned ahead.
        """
        lease = request.lease
        assert lease is not None, f"{request} is running, but owns no memory"
        while not self._memory.extend(lease, request.planned_tokens + 1):
            running = self._books.running.values()
            victim = self._latest(other for other in running if self._plans_ahead or not other.in_flight)
            if victim.in_flight:
                return False
            if victim in chosen:
                # A victim that was planned earlier in this step leaves the plan as well.
                chosen.remove(victim)
            self._core.retract(victim)
            if victim is request:
                return False
        return True

    # -- victims --

    def _latest(self, candidates: Iterable[Request]) -> Request:
        """Return the request to retract: the latest arrival of the lowest priority."""
        return min(candidates, key=lambda request: (request.priority, -request.arrival))

    def _victims_of(self, request: Request) -> list[Request]:
        """Return the running requests of lower priority that could be retracted now."""
        return [
            other for other in self._books.running.values() if other.priority < request.priority and not other.in_flight
        ]

    def _preempt_for(self, request: Request) -> None:
        """Retract requests of lower priority until this one fits, unless even all of them would not be enough."""
        memory, victims = self._memory, self._victims_of(request)
        tokens, spare = len(request.ids), len(self._books.running)
        owned = [victim.lease for victim in victims if victim.lease is not None]
        if not victims or not memory.has_room(tokens, spare_pages=spare, without=owned):
            return
        while victims and not (memory.rows.free and memory.has_room(tokens, spare_pages=spare)):
            victim = self._latest(victims)
            victims.remove(victim)
            self._core.retract(victim)

    def _add_segment(
        self,
        plan: Plan,
        request: Request,
        start: int,
        end: int,
        *,
        emits: bool,
        share: SegmentShare,
        drafts: tuple[int, ...] = (),
    ) -> None:
        """Add a segment of a request, with the pages that the stages do not know yet.

        ``share`` has the fields that features filled in.
        """
        lease = request.lease
        assert lease is not None, f"{request} is planned, but owns no memory"
        unsent = lease.unsent
        lease.unsent = len(lease.pages)
        request.planned_tokens = end + len(drafts)
        request.in_flight += 1
        for feature in self._hooks.fill:
            feature.fill(request, unsent, share)
        segment = Segment(
            rid=request.rid,
            row=lease.row,
            start=start,
            token_ids=(tuple(request.ids[start:end]) or self._unknown) + drafts,
            page_start=unsent,
            pages=tuple(lease.pages[unsent:]),
            emits=emits,
            # Only in the first segment of a request: a page replaced by the tree's page is sent again, a spec is not.
            sampling=request.spec if start == request.prefill_start else None,
            drafts=len(drafts),
        )
        if share:
            # Not ``**share`` above, which would take a sixth of a step of decodes.
            segment = msgspec.structs.replace(segment, **share)
        plan.segments.append(segment)
        plan.requests.append(request)
        plan.tokens += request.planned_tokens - start
