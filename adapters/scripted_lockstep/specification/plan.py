"""The plan of a step of the executable specification: its prompts and decodes, and the requests that give way.

Names in bold are the rules of docs/rules.md. This module launches nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from engine.core.limits import Limits
from scripted_lockstep.specification.calls import SpecifiedCalls
from scripted_lockstep.specification.drafts import drafts_of
from scripted_lockstep.specification.gap import SpecifiedGap
from scripted_lockstep.specification.grammars import SpecifiedGrammars
from scripted_lockstep.specification.memory import SpecifiedMemory
from scripted_lockstep.specification.queue import by_policy, is_overdue, overtake, victim_order
from scripted_lockstep.specification.request import SpecifiedRequest as Request
from scripted_lockstep.specification.transfers import SpecifiedTransfers

TRIES_LIMIT: Final = 16
LEAST_SPARED_TOKENS: Final = 64

Part = tuple[Request, int, int]  # A request, and the range of its tokens in a microbatch.


class _Engine(Protocol):
    limits: Limits
    memory: SpecifiedMemory
    grammars: SpecifiedGrammars
    totals: dict[str, int]
    transfers: SpecifiedTransfers
    calls: SpecifiedCalls
    gap: SpecifiedGap
    now: float
    running: list[Request]
    chunked: Request | None

    @property
    def waiting(self) -> list[Request]: ...

    def ready(self) -> list[Request]: ...

    def ahead(self) -> list[Request]: ...

    def retract(self, request: Request) -> None: ...


def plan_of(engine: _Engine) -> tuple[list[Part], list[Part]]:
    """**Mixed**: decodes first, prompts into the rest; else decodes when there are no prompts. **Seats**: for all."""
    budget, limits = engine.limits.prefill_budget_tokens, engine.limits
    if not limits.mixed_chunk:
        prompts = _prompts(engine, budget, limits.most_requests)
        return prompts, [] if prompts else _decodes(engine, limits.most_requests, with_drafts=True)
    left_to_prompts = max(1, min(limits.page_size, budget // 2)) if limits.chunking else budget
    has_prompts = engine.chunked is not None or bool(engine.waiting or engine.transfers.transferring)
    most = limits.most_requests
    count = len(_choose_decodes(engine, min(budget - left_to_prompts, most - 1))) if has_prompts else 0
    beside = budget - count
    if engine.running and engine.gap.is_bounded:
        beside = min(beside, engine.gap.beside(count))
    prompts = _prompts(engine, beside, most - count)
    taken = sum([end - start for _, start, end in prompts])
    left = min(count + beside - taken, most - len(prompts)) if prompts else most
    return prompts, _decodes(engine, left, with_drafts=not prompts)


def _prompts(engine: _Engine, budget: int, seats: int) -> list[Part]:
    """**Start**: the next part of the split prompt, then requests of the queue while the budget lasts."""
    plan: list[Part] = []
    tries = 0
    for request in _candidates(engine, plan, budget, seats):
        overtaken: list[Request] = []
        if not request.owns_memory:
            if request.lacks_lora and not is_overdue(request):
                continue
            has_row = engine.memory.free_rows or (
                engine.limits.priority_preemption and _of_lower_priority(engine, request)
            )
            is_worth = len(plan) < seats and _is_worth(engine, budget, request, alone=not plan)
            if engine.chunked is not None or request.lacks_lora or not has_row or not is_worth:
                break
            if _waits_for_another(engine, request) or not _admit(engine, request):
                tries += 1
                if tries >= TRIES_LIMIT or is_overdue(request):
                    break
                continue
            overtaken = overtake(request, engine.grammars.startable(engine.waiting), engine.limits)
            if request.is_receiving:
                if any(map(is_overdue, overtaken)):
                    break
                continue
        start = request.planned_tokens
        end = start + _next_part(engine.limits, plan, start, request.goal_tokens - start, budget)
        if not engine.memory.extend(request, end):
            break
        request.planned_tokens, request.in_flight = end, request.in_flight + 1
        request.parts += start > request.hit_tokens or end < request.goal_tokens
        engine.chunked = None if end == request.goal_tokens else request
        budget -= end - start
        plan.append((request, start, end))
        if any(map(is_overdue, overtaken)):
            break
    return plan


def _candidates(engine: _Engine, plan: Sequence[Part], budget: int, seats: int) -> Iterator[Request]:
    """**Order**: the split prompt, then the queue as it is once that prompt's next part has its pages.

    **Receive**: between the two come received prompts, as far as their rest fits the microbatch as a whole.
    """
    if engine.chunked is not None:
        yield engine.chunked
    while engine.chunked is None and (received := engine.transfers.next_received) is not None:
        left = budget - sum([end - start for _, start, end in plan])
        if plan and (len(plan) >= seats or received.goal_tokens - received.planned_tokens > left):
            break
        received.is_receiving, engine.chunked = False, received
        yield received
    yield from by_policy(engine.grammars.startable(engine.waiting), engine.limits, engine.memory)


def _waits_for_another(engine: _Engine, request: Request) -> bool:
    """**Shared**: a prompt launched to its end or received, and to be published, spares this one most of its work."""
    memory, size, receives = engine.memory, engine.limits.page_size, engine.transfers.may_receive(request)
    for other in memory.owners if engine.limits.radix_cache else ():
        if other.is_running or other is engine.chunked or other.end is not None:
            continue
        is_left = other.is_leaving or other.is_delivering or (other.is_receiving and not receives)
        if is_left or other.kv_key != request.kv_key:
            continue
        pairs = [*zip(request.ids[: request.may_hit], other.ids, strict=False)]
        alike = next((place for place, (one, two) in enumerate(pairs) if one != two), len(pairs))
        hit = memory.hit_pages(request) * size
        spared = alike // size * size - hit
        if spared >= LEAST_SPARED_TOKENS and 2 * spared >= len(request.ids) - hit:
            return True
    return False


def _is_worth(engine: _Engine, budget: int, request: Request, *, alone: bool) -> bool:
    """**Sliver**: beside other prompts only a whole prompt, or a part of at least one page, is worth it."""
    if alone or len(request.ids) <= budget:
        return budget > 0
    may_split = engine.limits.chunking or len(request.ids) > engine.limits.prefill_budget_tokens
    return may_split and budget >= engine.limits.page_size


def _admit(engine: _Engine, request: Request) -> bool:
    """**Room**: admit a request if there is room for all of its tokens and a page for each running request."""
    memory = engine.memory
    if engine.limits.priority_preemption:
        _preempt_for(engine, request)
    if not memory.free_rows or not memory.admit(request, len(engine.running)):
        return False
    request.hit_tokens = request.planned_tokens = request.pages * engine.limits.page_size
    request.goal_tokens = len(request.ids)
    memory.count_hit(request, engine.totals)
    engine.transfers.receive(request, engine.now, engine.calls.weights[-1] or "")
    return True


def _choose_decodes(engine: _Engine, most: int) -> list[Request]:
    """**Turns**: least recently launched first, and at most one stage's share of all running requests."""
    most = min(most, -(-len(engine.running) // engine.limits.pp_size))
    chosen: list[Request] = []
    waits = False
    for request in engine.ready():
        if len(chosen) < most and request.is_running:
            has_room = _make_room(engine, request, chosen)
            chosen += [request] * has_room
            waits |= request.is_running and not has_room
    for request in [] if waits else engine.ahead():
        if len(chosen) < most and engine.memory.extend(request, request.planned_tokens + 1):
            chosen.append(request)
    return chosen


def _decodes(engine: _Engine, most: int, *, with_drafts: bool) -> list[Part]:
    chosen, places = _choose_decodes(engine, most), []
    for request in chosen:
        places.append(len(request.ids) + request.in_flight)
        if with_drafts and engine.limits.draft_tokens:
            request.drafts = drafts_of(request, engine)
            engine.memory.extend(request, len(request.ids) + len(request.drafts))
        request.planned_tokens, request.in_flight = places[-1] + len(request.drafts), request.in_flight + 1
    engine.running = [request for request in engine.running if request not in chosen] + chosen
    return [(request, end - 1, end) for request, end in zip(chosen, places, strict=True)]


def _make_room(engine: _Engine, request: Request, chosen: list[Request]) -> bool:
    """**Victim**: while a decode has no page for its next token, retract one request, if need be the decode itself.

    A victim that is in flight because it was planned ahead must land first.
    """
    while not engine.memory.extend(request, request.planned_tokens + 1):
        victim = max(engine.running if engine.limits.async_scheduling else engine.ready(), key=victim_order)
        if victim.in_flight:
            return False
        chosen[:] = [one for one in chosen if one is not victim]
        engine.retract(victim)
        if victim is request:
            return False
    return True


def _of_lower_priority(engine: _Engine, request: Request) -> list[Request]:
    return [one for one in engine.ready() if one.priority < request.priority]


def _preempt_for(engine: _Engine, request: Request) -> None:
    """**Preempt**: retract as many requests of lower priority as needed, or none if all would not suffice."""
    memory, victims, need = engine.memory, _of_lower_priority(engine, request), (len(request.ids), len(engine.running))
    if not memory.has_room(*need, [owner for owner in memory.owners if owner not in victims]):
        return
    while victims and not (memory.free_rows and memory.has_room(*need, memory.owners)):
        victim = max(victims, key=victim_order)
        victims.remove(victim)
        engine.retract(victim)


def _next_part(limits: Limits, plan: Sequence[Part], prefix: int, rest: int, room: int) -> int:
    """**Chunks**: all tokens that have room. **Even**: as many pages as the microbatch can bear, at least one."""
    if not limits.dynamic_chunking:
        return min(rest, room)
    most, page = _cost(limits, 0, limits.prefill_budget_tokens), limits.page_size
    spent = sum([_cost(limits, start, end - start) for _, start, end in plan])
    end = prefix - prefix % page
    while spent + _cost(limits, prefix, end + page - prefix) <= most:
        end += page
    tokens = max(page, end - prefix)
    return min(rest if rest < tokens + page else tokens, room)


def _cost(limits: Limits, prefix: int, tokens: int) -> int:
    """**Even**: the cost of a part of a prompt: its tokens, each by the prefix that it attends to."""
    return tokens * (2 * limits.chunk_parity_tokens + 2 * prefix + tokens)
