"""Mutants of retraction: requests that are sent back to the queue by a pause, by pressure or by priority."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Iterable

from engine.memory import KVMemory, Lease
from engine.plan import Microbatch
from engine.scheduler import Books, Place, Request, Scheduler
from engine.scheduler.planner import Planner
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["RETRACTING"]

_retract_all = Planner.retract_all
_release_if_landed = Scheduler._release_if_landed
_make_room = Planner._make_room
_admit = Planner._admit
_enqueue = Books.enqueue
_launch = Scheduler._launch


def _retract_all_but_the_dispatched(planner: Planner) -> None:
    books = planner._books
    registered = books.requests
    books.requests = {rid: request for rid, request in registered.items() if request.place is not Place.DISPATCHED}
    _retract_all(planner)
    books.requests = registered


def _extend_before_anything_is_freed(memory: KVMemory, lease: Lease, tokens: int) -> bool:
    need = memory.pages_for(tokens) - len(lease.pages)
    if need > 0:
        lease.pages += memory.pages.allocate(need)
    return True


def _retract_all_at_once(planner: Planner) -> None:
    for request in planner._books.requests.values():
        request.in_flight = 0
    _retract_all(planner)


def _land_with_the_first_result(scheduler: Scheduler, request: Request) -> None:
    if request.place is Place.RETRACTING:
        request.in_flight = 0
    _release_if_landed(scheduler, request)


def _admit_the_prompt_only(planner: Planner, request: Request) -> bool:
    admitted = _admit(planner, request)
    if admitted:
        request.prefill_tokens = request.prompt_tokens
    return admitted


def _make_room_behind_the_plan(planner: Planner, request: Request, chosen: list[Request]) -> bool:
    return _make_room(planner, request, list(chosen))


def _enqueue_last(books: Books, request: Request) -> None:
    if request.retractions:
        request.arrival = max((other.arrival for other in books.requests.values()), default=0) + 1
    _enqueue(books, request)


def _launch_while_paused(scheduler: Scheduler) -> Microbatch | None:
    paused, scheduler.books.paused = scheduler.books.paused, None
    microbatch = _launch(scheduler)
    scheduler.books.paused = paused
    return microbatch


def _earliest(planner: Planner, candidates: Iterable[Request]) -> Request:
    del planner
    return min(candidates, key=lambda request: request.arrival)


RETRACTING = (
    Mutant(
        name="pause-overlooks-the-dispatched",
        origin="G05: SGLang issue 20272 and its fix",
        bug="pause (retract) overlooks requests whose last chunk is on its way back; they slip into the running set",
        signature="a paused request slipped into the running set",
        test=f"{GALLERY_TESTS}/test_g05_pause_after_last_chunk.py::test_pause_around_the_last_chunk",
        owner=Planner,
        attribute="retract_all",
        replacement=_retract_all_but_the_dispatched,
    ),
    Mutant(
        name="retraction-frees-too-late",
        origin="G14: SGLang issue 14972",
        bug="the next token's page is allocated before the pages of those who give way are free",
        signature="ask first",
        test=f"{GALLERY_TESTS}/test_g14_retract_in_a_small_pool.py::test_six_requests_in_a_pool_for_three",
        owner=KVMemory,
        attribute="extend",
        replacement=_extend_before_anything_is_freed,
    ),
    Mutant(
        name="retraction-ignores-in-flight",
        origin="G15: vLLM pull request 48245",
        bug="a request is rolled back while results of it are in flight; they count it down below zero",
        signature="owned no memory while it was in flight",
        test=f"{GALLERY_TESTS}/test_g15_retract_with_results_in_flight.py::test_retract_with_results_in_flight",
        owner=Planner,
        attribute="retract_all",
        replacement=_retract_all_at_once,
    ),
    Mutant(
        name="retraction-waits-for-one-result",
        origin="G15: vLLM pull request 47900, the first fix",
        bug="a request that is retracted waits for one result, when several are in flight",
        signature="it is waiting with 1 results in flight",
        test=f"{GALLERY_TESTS}/test_g15_retract_with_results_in_flight.py::test_retract_with_results_in_flight",
        owner=Scheduler,
        attribute="_release_if_landed",
        replacement=_land_with_the_first_result,
    ),
    Mutant(
        name="resume-cuts-the-output",
        origin="G16: vLLM pull request 28787",
        bug="a retracted request computes only its prompt anew, not the tokens that it has emitted",
        signature="but the same request run alone says",
        test=f"{GALLERY_TESTS}/test_g16_resume.py::test_resume_after_retraction",
        owner=Planner,
        attribute="_admit",
        replacement=_admit_the_prompt_only,
    ),
    Mutant(
        name="victim-stays-planned",
        origin="G17: vLLM issue 23347",
        bug="a request that was planned earlier in a step and is retracted later in it stays in the plan",
        signature="KeyError: 'scripted-1'",
        test=f"{GALLERY_TESTS}/test_g17_planned_victim.py::test_a_victim_leaves_the_plan",
        owner=Planner,
        attribute="_make_room",
        replacement=_make_room_behind_the_plan,
    ),
    Mutant(
        name="retracted-request-loses-its-place",
        origin="G18: vLLM issue 41951",
        bug="a retracted request goes to the end of the queue, after all that came since",
        signature="overtaken by",
        test=f"{GALLERY_TESTS}/test_g18_place_in_the_queue.py::test_a_retracted_request_keeps_its_place",
        owner=Books,
        attribute="enqueue",
        replacement=_enqueue_last,
    ),
    Mutant(
        name="pause-does-not-stop-launches",
        origin="C06: what /pause_generation promises",
        bug="microbatches are launched while the engine is paused",
        signature="a microbatch was launched while paused",
        test="tests/registered/core/test_pauses.py::test_pause_in_place_freezes_and_resumes",
        owner=Scheduler,
        attribute="_launch",
        replacement=_launch_while_paused,
    ),
    Mutant(
        name="victim-is-the-earliest",
        origin="B06: the latest arrival gives way",
        bug="the request that has worked longest is sent back to the queue, and then the next one",
        signature="an earlier request gave way",
        test="tests/registered/pressure/test_ballast.py::test_ballast_is_retracted_and_recovers",
        owner=Planner,
        attribute="_latest",
        replacement=_earliest,
    ),
)
