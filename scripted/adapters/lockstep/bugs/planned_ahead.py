"""Mutants of asynchronous scheduling: what is planned before the token before it is known."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["PLANNED_AHEAD"]

_TESTS: Final = "tests/registered/scheduling/test_async_scheduling.py"


PLANNED_AHEAD: Final = (
    Mutant(
        name="a-stop-frees-what-went-ahead",
        origin="vLLM pull request 45357, SGLang pull request 18803",
        bug="a request that stops gives pages and row back while the decode that was planned ahead is in flight",
        signature="owns no memory",
        test=f"{_TESTS}::test_pages_are_kept_until_the_token_too_many_is_back",
        target="engine.scheduler.scheduler:Scheduler._end",
        cut="elif request.in_flight:",
        becomes="elif request.in_flight and reason is not STOP:",
    ),
    Mutant(
        name="a-token-too-many-is-cached",
        origin="SGLang issue 24590",
        bug="the token that ended a request is cached with its output: the decode planned ahead has computed it",
        signature="cached",
        test=f"{_TESTS}::test_what_is_cached_ends_before_the_token_that_stopped",
        target="engine.scheduler.scheduler:Scheduler._free",
        cut="request.ids[:-1]",
        becomes="request.ids[: request.planned_tokens]",
    ),
    Mutant(
        name="an-output-is-not-cached",
        origin="the class of SGLang issue 24590",
        bug="the output of a request that stopped is not cached, because a decode of it was still in flight",
        signature="cached",
        test=f"{_TESTS}::test_what_is_cached_ends_before_the_token_that_stopped",
        target="engine.scheduler.scheduler:Scheduler._free",
        cut="if request.ended_by_token:",
        becomes="if request.ended_by_token and request.planned_tokens < len(request.ids):",
    ),
    Mutant(
        name="a-token-too-many-counts",
        origin="SGLang issue 34112",
        bug="the token that is computed after a stop is counted as generated",
        signature="tokens were generated",
        test=f"{_TESTS}::test_a_stop_is_the_last_token",
        target="engine.scheduler.scheduler:Scheduler._on_token",
        cut="self._release_if_landed(request)",
        becomes=(
            "elif request.finish_reason is STOP:\n"
            "        self.counters.generated_tokens += 1\n"
            "    self._release_if_landed(request)"
        ),
    ),
    Mutant(
        name="ahead-of-the-last-token",
        origin="vLLM pull request 29542",
        bug="a decode is planned ahead although the token on its way is the last that the request may have",
        signature="microbatches for",
        test=f"{_TESTS}::test_nothing_is_planned_ahead_of_the_last_token",
        target="engine.scheduler.planning_ahead:may_go_ahead",
        cut="len(request.ids) + 1 < request.limit_tokens",
        becomes="len(request.ids) < request.limit_tokens",
    ),
    Mutant(
        name="more-than-one-goes-ahead",
        origin="SGLang pull request 13713: one place for the token of a request that has several on their way",
        bug="a request is planned ahead again before the first of its tokens is back, with more microbatches in flight",
        signature="<= 2",
        test=f"{_TESTS}::test_at_most_one_decode_goes_ahead_beside_prompts",
        target="engine.scheduler.planning_ahead:may_go_ahead",
        cut="request.in_flight == 1",
        becomes="request.in_flight > 0",
    ),
    Mutant(
        name="nothing-goes-ahead",
        origin="the class of vLLM pull request 29542: requests leave the batch although nothing has ended them",
        bug="async_scheduling changes nothing: each decode waits for the token before it",
        signature="a decode was planned ahead",
        test=f"{_TESTS}::test_two_requests_say_what_they_say_alone",
        target="engine.scheduler.planning_ahead:may_go_ahead",
        cut="request.in_flight == 1",
        becomes="False",
    ),
    Mutant(
        name="ahead-of-a-penalty",
        origin="vLLM issue 27878",
        bug="a request with penalties is planned ahead: they do not count the token that is on its way",
        signature="is planned ahead",
        test=f"{_TESTS}::test_what_looks_back_waits_for_its_token",
        target="engine.scheduler.planning_ahead:may_go_ahead",
        cut="and not request.spec.has_penalty",
    ),
    Mutant(
        name="ahead-of-a-grammar",
        origin="vLLM issues 26292 and 29379",
        bug="a request with a grammar is planned ahead: its token is chosen by the state before the last one",
        signature="is planned ahead",
        test=f"{_TESTS}::test_what_looks_back_waits_for_its_token",
        target="engine.scheduler.planning_ahead:may_go_ahead",
        cut="and request.grammar is None",
    ),
    Mutant(
        name="ahead-of-the-urgent",
        origin="the class of vLLM issue 49674: a victim that is in flight gives nothing",
        bug="running requests are planned ahead for ever, so that none is ever free to be preempted",
        signature="still waits",
        test=f"{_TESTS}::test_the_urgent_preempt_what_went_ahead",
        target="engine.scheduler.planner:Planner._ahead",
        cut="if self._limits.priority_preemption and self._books.waiting:",
        becomes="if False:",
    ),
    Mutant(
        name="the-wrong-one-gives-way",
        origin="SGLang issue 14972, vLLM issue 49674",
        bug="the request that needs a page gives way itself, because all others are in flight, planned ahead",
        signature="gave way",
        test=f"{_TESTS}::test_the_latest_gives_way_when_it_is_back",
        target="engine.scheduler.planner:Planner._make_room",
        cut="if self._plans_ahead or not other.in_flight",
        becomes="if not other.in_flight",
    ),
    Mutant(
        name="retraction-forgets-what-went-ahead",
        origin="vLLM pull requests 48245 and 47900",
        bug="a request is sent back to the queue when one of its two decodes in flight is back",
        signature="decodes in flight",
        test=f"{_TESTS}::test_a_retraction_waits_for_both",
        target="engine.scheduler.scheduler:Scheduler._release_if_landed",
        cut="if request.in_flight:",
        becomes=(
            "if request.place is RETRACTING and request.in_flight == 1 and self.limits.async_scheduling:\n"
            "        request.in_flight = 0\n"
            "        self.planner.retract(request)\n"
            "        request.in_flight = 1\n"
            "    if request.in_flight:"
        ),
    ),
)
