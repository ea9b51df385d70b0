"""Mutants of asynchronous scheduling: what is planned before the token before it is known."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.messages import FinishReason
from engine.plan import SamplingSpec
from engine.scheduler import Place, Request, Scheduler, planner, planning_ahead
from engine.scheduler.planner import Planner
from scripted.core.mutant import Mutant

__all__ = ["PLANNED_AHEAD"]

_TESTS = "tests/registered/scheduling/test_async_scheduling.py"
_end = Scheduler._end
_free = Scheduler._free
_release_if_landed = Scheduler._release_if_landed
_make_room = Planner._make_room
_may_go_ahead = planning_ahead.may_go_ahead


def _free_what_stops_at_once(scheduler: Scheduler, request: Request, reason: FinishReason, **details: Any) -> None:
    _end(scheduler, request, reason, **details)
    if reason is FinishReason.STOP and request.in_flight:
        scheduler.books.take_out(request)
        _free(scheduler, request)


def _cache_what_was_computed(scheduler: Scheduler, request: Request) -> None:
    if request.ended_by_token and request.planned_tokens == len(request.ids) and request.lease is not None:
        scheduler.memory.publish(request.lease, request.ids, counts=False)
    _free(scheduler, request)


def _cache_nothing_of_what_went_ahead(scheduler: Scheduler, request: Request) -> None:
    request.ended_by_token = request.ended_by_token and request.planned_tokens < len(request.ids)
    _free(scheduler, request)


def _tell_what_was_computed_too_many(scheduler: Scheduler, request: Request, token: int, logprob: Any) -> None:
    if not request.is_finished:
        scheduler._take_token(request, token, logprob)
    elif request.finish_reason is FinishReason.STOP:
        scheduler.counters.generated_tokens += 1
    scheduler._release_if_landed(request)


def _go_on_to_the_limit(request: Request) -> bool:
    return request.in_flight == 1 and len(request.ids) < request.limit_tokens and _looks_ahead(request)


def _looks_ahead(request: Request) -> bool:
    return request.grammar is None and not planning_ahead._has_penalty(request.spec)


def _never_go_ahead(request: Request) -> bool:
    del request
    return False


def _go_on_and_on(request: Request) -> bool:
    before, request.in_flight = request.in_flight, 1
    try:
        return before > 0 and _may_go_ahead(request)
    finally:
        request.in_flight = before


def _forget_penalties(request: Request) -> bool:
    spec: SamplingSpec = request.spec
    plain = msgspec.structs.replace(spec, frequency_penalty=0.0, presence_penalty=0.0, repetition_penalty=1.0)
    request.spec = plain
    try:
        return _may_go_ahead(request)
    finally:
        request.spec = spec


def _forget_grammars(request: Request) -> bool:
    grammar, request.grammar = request.grammar, None
    try:
        return _may_go_ahead(request)
    finally:
        request.grammar = grammar


def _always_ahead(this: Planner) -> Sequence[Request]:
    return [request for request in this._books.running.values() if _may_go_ahead(request)]


def _only_the_ready_give_way(this: Planner, request: Request, chosen: list[Request]) -> bool:
    this._plans_ahead, before = False, this._plans_ahead
    try:
        return _make_room(this, request, chosen)
    finally:
        this._plans_ahead = before


def _retract_before_the_last_is_back(scheduler: Scheduler, request: Request) -> None:
    if request.place is Place.RETRACTING and request.in_flight == 1 and scheduler.limits.async_scheduling:
        request.in_flight = 0
        _release_if_landed(scheduler, request)
        request.in_flight = 1
    else:
        _release_if_landed(scheduler, request)


PLANNED_AHEAD: tuple[Mutant, ...] = (
    Mutant(
        name="a-stop-frees-what-went-ahead",
        origin="vLLM pull request 45357, SGLang pull request 18803",
        bug="a request that stops gives pages and row back while the decode that was planned ahead is in flight",
        signature="owns no memory",
        test=f"{_TESTS}::test_pages_are_kept_until_the_token_too_many_is_back",
        owner=Scheduler,
        attribute="_end",
        replacement=_free_what_stops_at_once,
    ),
    Mutant(
        name="a-token-too-many-is-cached",
        origin="SGLang issue 24590",
        bug="the token that ended a request is cached with its output: the decode planned ahead has computed it",
        signature="cached",
        test=f"{_TESTS}::test_what_is_cached_ends_before_the_token_that_stopped",
        owner=Scheduler,
        attribute="_free",
        replacement=_cache_what_was_computed,
    ),
    Mutant(
        name="an-output-is-not-cached",
        origin="the class of SGLang issue 24590",
        bug="the output of a request that stopped is not cached, because a decode of it was still in flight",
        signature="cached",
        test=f"{_TESTS}::test_what_is_cached_ends_before_the_token_that_stopped",
        owner=Scheduler,
        attribute="_free",
        replacement=_cache_nothing_of_what_went_ahead,
    ),
    Mutant(
        name="a-token-too-many-counts",
        origin="SGLang issue 34112",
        bug="the token that is computed after a stop is counted as generated",
        signature="tokens were generated",
        test=f"{_TESTS}::test_a_stop_is_the_last_token",
        owner=Scheduler,
        attribute="_on_token",
        replacement=_tell_what_was_computed_too_many,
    ),
    Mutant(
        name="ahead-of-the-last-token",
        origin="vLLM pull request 29542",
        bug="a decode is planned ahead although the token on its way is the last that the request may have",
        signature="microbatches for",
        test=f"{_TESTS}::test_nothing_is_planned_ahead_of_the_last_token",
        owner=planner,
        attribute="may_go_ahead",
        replacement=_go_on_to_the_limit,
    ),
    Mutant(
        name="more-than-one-goes-ahead",
        origin="SGLang pull request 13713: one place for the token of a request that has several on their way",
        bug="a request is planned ahead again before the first of its tokens is back, with more microbatches in flight",
        signature="<= 2",
        test=f"{_TESTS}::test_at_most_one_decode_goes_ahead_beside_prompts",
        owner=planner,
        attribute="may_go_ahead",
        replacement=_go_on_and_on,
    ),
    Mutant(
        name="nothing-goes-ahead",
        origin="the class of vLLM pull request 29542: requests leave the batch although nothing has ended them",
        bug="async_scheduling changes nothing: each decode waits for the token before it",
        signature="a decode was planned ahead",
        test=f"{_TESTS}::test_two_requests_say_what_they_say_alone",
        owner=planner,
        attribute="may_go_ahead",
        replacement=_never_go_ahead,
    ),
    Mutant(
        name="ahead-of-a-penalty",
        origin="vLLM issue 27878",
        bug="a request with penalties is planned ahead: they do not count the token that is on its way",
        signature="is planned ahead",
        test=f"{_TESTS}::test_what_looks_back_waits_for_its_token",
        owner=planner,
        attribute="may_go_ahead",
        replacement=_forget_penalties,
    ),
    Mutant(
        name="ahead-of-a-grammar",
        origin="vLLM issues 26292 and 29379",
        bug="a request with a grammar is planned ahead: its token is chosen by the state before the last one",
        signature="is planned ahead",
        test=f"{_TESTS}::test_what_looks_back_waits_for_its_token",
        owner=planner,
        attribute="may_go_ahead",
        replacement=_forget_grammars,
    ),
    Mutant(
        name="ahead-of-the-urgent",
        origin="the class of vLLM issue 49674: a victim that is in flight gives nothing",
        bug="running requests are planned ahead for ever, so that none is ever free to be preempted",
        signature="still waits",
        test=f"{_TESTS}::test_the_urgent_preempt_what_went_ahead",
        owner=Planner,
        attribute="_ahead",
        replacement=_always_ahead,
    ),
    Mutant(
        name="the-wrong-one-gives-way",
        origin="SGLang issue 14972, vLLM issue 49674",
        bug="the request that needs a page gives way itself, because all others are in flight, planned ahead",
        signature="gave way",
        test=f"{_TESTS}::test_the_latest_gives_way_when_it_is_back",
        owner=Planner,
        attribute="_make_room",
        replacement=_only_the_ready_give_way,
    ),
    Mutant(
        name="retraction-forgets-what-went-ahead",
        origin="vLLM pull requests 48245 and 47900",
        bug="a request is sent back to the queue when one of its two decodes in flight is back",
        signature="decodes in flight",
        test=f"{_TESTS}::test_a_retraction_waits_for_both",
        owner=Scheduler,
        attribute="_release_if_landed",
        replacement=_retract_before_the_last_is_back,
    ),
)
