"""Mutants of time limits and of the load that a router is told."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

import weakref
from typing import Final

from engine.memory import KVMemory
from engine.messages import FinishReason
from engine.scheduler import Books, Request, Scheduler, sizes
from engine.scheduler.load import pending_prefill_tokens
from engine.scheduler.planner import Planner
from engine.scheduler.time_limits import Allowed
from scripted.core.mutant import Mutant

__all__ = ["LIMITS_AND_LOAD"]

_LIMITS: Final = "tests/registered/scheduling/test_time_limits.py"
_LOAD: Final = "tests/registered/core/test_router_load.py"

_end_overdue = Scheduler._end_overdue
_retract = Planner.retract
# By the arrival of each request.
_first_hits: weakref.WeakKeyDictionary[Books, dict[int, int]] = weakref.WeakKeyDictionary()


def _end_overdue_where_it_plans(scheduler: Scheduler) -> None:
    if scheduler.books.paused is None:
        _end_overdue(scheduler)


def _deadline_of_calls(scheduler: Scheduler) -> float | None:
    return scheduler.controls.deadline


def _end_overdue_as_too_long(scheduler: Scheduler) -> None:
    for request in scheduler.time_limits.over(scheduler.now):
        error = scheduler.time_limits.why(request, scheduler.now)
        scheduler._end(request, FinishReason.LENGTH, error=error)


def _end_overdue_as_if_landed(scheduler: Scheduler) -> None:
    for request in scheduler.time_limits.over(scheduler.now):
        flying, request.in_flight = request.in_flight, 0
        error = scheduler.time_limits.why(request, scheduler.now)
        scheduler._end(request, FinishReason.TIMEOUT, error=error)
        request.in_flight = flying


def _retract_as_if_new(planner: Planner, request: Request) -> None:
    _retract(planner, request)
    limits = planner._time_limits
    if limits._waiting_s is not None and request.rid not in limits._allowed:
        # The time of its arrival, as good as: what runs is bound from the beginning.
        limits._put(request, Allowed(0.0, None, limits._waiting_s))


def _count_whole_prompts(books: Books, memory: KVMemory) -> int:
    cached = sum([memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key) for one in books.waiting])
    return pending_prefill_tokens(books, memory) + cached


def _count_confirmed_parts(books: Books, memory: KVMemory) -> int:
    flying = sum(
        len(segment.token_ids)
        for launched in books.in_flight
        for segment, request in zip(launched.microbatch.segments, launched.requests, strict=True)
        if request is books.chunked
    )
    return pending_prefill_tokens(books, memory) + flying


def _count_first_hits(books: Books, memory: KVMemory) -> int:
    late, hits = 0, _first_hits.setdefault(books, {})
    for one in books.waiting:
        now = memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key)
        late += now - hits.setdefault(one.arrival, now)
    return pending_prefill_tokens(books, memory) + late


LIMITS_AND_LOAD = (
    Mutant(
        name="time-is-looked-at-only-to-plan",
        origin="SGLang pull request 34457",
        bug="time limits are looked at where a batch is made, which not every loop does: there they end nothing",
        signature="its time is over, and it waits on",
        test=f"{_LIMITS}::test_a_pause_stops_no_clock",
        owner=Scheduler,
        attribute="_end_overdue",
        replacement=_end_overdue_where_it_plans,
    ),
    Mutant(
        name="time-limit-wakes-no-gate",
        origin="vLLM pull request 36130: requests that hang until a proxy gives up",
        bug="nothing tells the gate when a request's time is over, so an engine that waits ends it with the next event",
        signature="nothing wakes a gate that waits",
        test=f"{_LIMITS}::test_not_started_in_time",
        owner=Scheduler,
        attribute="deadline",
        replacement=property(_deadline_of_calls),
    ),
    Mutant(
        name="timeout-is-called-length",
        origin="imp issue 1640 and atlas issue 482",
        bug="a request whose time is over ends as if it had all its tokens, and what was cut off passes for an answer",
        signature="a client cannot tell the end of its time",
        test=f"{_LIMITS}::test_a_running_request_keeps_what_it_has",
        owner=Scheduler,
        attribute="_end_overdue",
        replacement=_end_overdue_as_too_long,
    ),
    Mutant(
        name="timeout-frees-in-flight",
        origin="SGLang pull requests 18760 and 35049",
        bug="the end of a request's time takes its memory at once, and its result meets a request without any",
        signature="its pages were freed while it is in flight",
        test=f"{_LIMITS}::test_a_running_request_keeps_what_it_has",
        owner=Scheduler,
        attribute="_end_overdue",
        replacement=_end_overdue_as_if_landed,
    ),
    Mutant(
        name="sent-back-must-start-in-time",
        origin="SGLang: the waiting limit counts from a time of entry that is never renewed",
        bug="a request that had started and was sent back is ended for not starting in time, with all its tokens",
        signature="it had started, and was ended with all its tokens",
        test=f"{_LIMITS}::test_a_request_that_was_sent_back_is_not_bound_to_start_again",
        owner=Planner,
        attribute="retract",
        replacement=_retract_as_if_new,
    ),
    Mutant(
        name="load-counts-what-is-cached",
        origin="SGLang pull requests 27174 and 35248",
        bug="the whole prompt of a request that waits counts as pending, however much of it is cached",
        signature="a cached prefix counts as work",
        test=f"{_LOAD}::test_what_is_cached_is_not_pending",
        owner=sizes,
        attribute="pending_prefill_tokens",
        replacement=_count_whole_prompts,
    ),
    Mutant(
        name="load-counts-what-is-launched",
        origin="SGLang pull request 22480",
        bug="the part of a split prompt that is in flight counts as pending until its result is back",
        signature="what is launched is still to be launched",
        test=f"{_LOAD}::test_what_is_launched_is_not_pending",
        owner=sizes,
        attribute="pending_prefill_tokens",
        replacement=_count_confirmed_parts,
    ),
    Mutant(
        name="load-keeps-the-first-hit",
        origin="vLLM pull request 38025",
        bug="what is cached of a prompt is looked up when it arrives, and never again while it waits",
        signature="the hit of its arrival counts, not that of now",
        test=f"{_LOAD}::test_what_was_computed_meanwhile_is_not_pending",
        owner=sizes,
        attribute="pending_prefill_tokens",
        replacement=_count_first_hits,
    ),
)
