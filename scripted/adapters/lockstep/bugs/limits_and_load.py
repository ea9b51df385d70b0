"""Mutants of time limits and of the load that a router is told."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

import weakref
from typing import Final

from engine.memory import KVMemory
from engine.scheduler import Books, Request
from engine.scheduler.load import pending_prefill_tokens
from engine.scheduler.planner import Planner
from engine.scheduler.time_limits import Allowed
from scripted.core.mutant import Mutant

__all__ = ["LIMITS_AND_LOAD"]

_LIMITS: Final = "tests/registered/scheduling/test_time_limits.py"
_LOAD: Final = "tests/registered/core/test_router_load.py"
_retract = Planner.retract
# By the arrival of each request.
_first_hits: weakref.WeakKeyDictionary[Books, dict[int, int]] = weakref.WeakKeyDictionary()


def _retract_as_if_new(planner: Planner, request: Request) -> None:
    _retract(planner, request)
    limits = planner._time_limits
    if limits._waiting_s is not None and request.rid not in limits._allowed:
        # The time of its arrival, as good as: what runs is bound from the beginning.
        limits._put(request, Allowed(0.0, None, limits._waiting_s))


def _count_first_hits(books: Books, memory: KVMemory) -> int:
    late, hits = 0, _first_hits.setdefault(books, {})
    for one in books.waiting:
        now = memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key)
        late += now - hits.setdefault(one.arrival, now)
    return pending_prefill_tokens(books, memory) + late


LIMITS_AND_LOAD: Final = (
    Mutant(
        name="time-is-looked-at-only-to-plan",
        origin="SGLang pull request 34457",
        bug="time limits are looked at where a batch is made, which not every loop does: there they end nothing",
        signature="its time is over, and it waits on",
        test=f"{_LIMITS}::test_a_pause_stops_no_clock",
        target="engine.scheduler.scheduler:Scheduler._end_overdue",
        cut="self.time_limits.over(self.now)",
        becomes="self.time_limits.over(self.now) if self.books.paused is None else ()",
    ),
    Mutant(
        name="time-limit-wakes-no-gate",
        origin="vLLM pull request 36130: requests that hang until a proxy gives up",
        bug="nothing tells the gate when a request's time is over, so an engine that waits ends it with the next event",
        signature="nothing wakes a gate that waits",
        test=f"{_LIMITS}::test_not_started_in_time",
        target="engine.scheduler.scheduler:Scheduler.deadline",
        cut="request if call is None else call if request is None else min(call, request)",
        becomes="call",
    ),
    Mutant(
        name="timeout-is-called-length",
        origin="imp issue 1640 and atlas issue 482",
        bug="a request whose time is over ends as if it had all its tokens, and what was cut off passes for an answer",
        signature="a client cannot tell the end of its time",
        test=f"{_LIMITS}::test_a_running_request_keeps_what_it_has",
        target="engine.scheduler.scheduler:Scheduler._end_overdue",
        cut="FinishReason.TIMEOUT",
        becomes="FinishReason.LENGTH",
    ),
    Mutant(
        name="timeout-frees-in-flight",
        origin="SGLang pull requests 18760 and 35049",
        bug="the end of a request's time takes its memory at once, and its result meets a request without any",
        signature="its pages were freed while it is in flight",
        test=f"{_LIMITS}::test_a_running_request_keeps_what_it_has",
        target="engine.scheduler.scheduler:Scheduler._end",
        cut="elif request.in_flight:",
        becomes="elif request.in_flight and reason is not FinishReason.TIMEOUT:",
    ),
    Mutant(
        name="sent-back-must-start-in-time",
        origin="SGLang: the waiting limit counts from a time of entry that is never renewed",
        bug="a request that had started and was sent back is ended for not starting in time, with all its tokens",
        signature="it had started, and was ended with all its tokens",
        test=f"{_LIMITS}::test_a_request_that_was_sent_back_is_not_bound_to_start_again",
        target="engine.scheduler.planner:Planner.retract",
        replacement=_retract_as_if_new,
    ),
    Mutant(
        name="load-counts-what-is-cached",
        origin="SGLang pull requests 27174 and 35248",
        bug="the whole prompt of a request that waits counts as pending, however much of it is cached",
        signature="a cached prefix counts as work",
        test=f"{_LOAD}::test_what_is_cached_is_not_pending",
        target="engine.scheduler.load:pending_prefill_tokens",
        cut=" - memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key)",
    ),
    Mutant(
        name="load-counts-what-is-launched",
        origin="SGLang pull request 22480",
        bug="the part of a split prompt that is in flight counts as pending until its result is back",
        signature="what is launched is still to be launched",
        test=f"{_LOAD}::test_what_is_launched_is_not_pending",
        target="engine.scheduler.load:pending_prefill_tokens",
        cut="if not books.waiting:",
        becomes=(
            "if chunked is not None:\n"
            "        flying = [part for one in books.in_flight for part in one.microbatch.segments]\n"
            "        rest += sum([len(part.token_ids) for part in flying if part.rid == chunked.rid])\n"
            "    if not books.waiting:"
        ),
    ),
    Mutant(
        name="load-keeps-the-first-hit",
        origin="vLLM pull request 38025",
        bug="what is cached of a prompt is looked up when it arrives, and never again while it waits",
        signature="the hit of its arrival counts, not that of now",
        test=f"{_LOAD}::test_what_was_computed_meanwhile_is_not_pending",
        target="engine.scheduler.sizes:pending_prefill_tokens",
        replacement=_count_first_hits,
    ),
)
