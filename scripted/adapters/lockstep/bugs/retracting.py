"""Mutants of retraction: requests that are sent back to the queue by a pause, by pressure or by priority."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["RETRACTING"]


RETRACTING: Final = (
    Mutant(
        name="pause-overlooks-the-dispatched",
        origin="G05: SGLang issue 20272 and its fix",
        bug="pause (retract) overlooks requests whose last chunk is on its way back; they slip into the running set",
        signature="a paused request slipped into the running set",
        test=f"{GALLERY_TESTS}/test_g05_pause_after_last_chunk.py::test_pause_around_the_last_chunk",
        target="engine.scheduler.planner:Planner.retract_all",
        cut="if request.lease is None or",
        becomes="if request.place is DISPATCHED or request.lease is None or",
    ),
    Mutant(
        name="retraction-frees-too-late",
        origin="G14: SGLang issue 14972",
        bug="the next token's page is allocated before the pages of those who give way are free",
        signature="ask first",
        test=f"{GALLERY_TESTS}/test_g14_retract_in_a_small_pool.py::test_six_requests_in_a_pool_for_three",
        target="engine.memory.kv:KVMemory.extend",
        cut="if short > 0 and (short > self.tree.evictable_pages or self.tree.evict(short) < short):",
        becomes="if False:",
    ),
    Mutant(
        name="retraction-ignores-in-flight",
        origin="G15: vLLM pull request 48245",
        bug="a request is rolled back while results of it are in flight; they count it down below zero",
        signature="owned no memory while it was in flight",
        test=f"{GALLERY_TESTS}/test_g15_retract_with_results_in_flight.py::test_retract_with_results_in_flight",
        target="engine.scheduler.planner:Planner.retract_all",
        cut="if not request.in_flight:",
        becomes="request.in_flight = 0\n        if True:",
    ),
    Mutant(
        name="retraction-waits-for-one-result",
        origin="G15: vLLM pull request 47900, the first fix",
        bug="a request that is retracted waits for one result, when several are in flight",
        signature="it is waiting with 1 results in flight",
        test=f"{GALLERY_TESTS}/test_g15_retract_with_results_in_flight.py::test_retract_with_results_in_flight",
        target="engine.scheduler.scheduler:Scheduler._release_if_landed",
        cut="if request.in_flight:",
        becomes=(
            "if request.in_flight and request.place is RETRACTING:\n"
            "        request.in_flight = 0\n"
            "    if request.in_flight:"
        ),
    ),
    Mutant(
        name="resume-cuts-the-output",
        origin="G16: vLLM pull request 28787",
        bug="a retracted request computes only its prompt anew, not the tokens that it has emitted",
        signature="but the same request run alone says",
        test=f"{GALLERY_TESTS}/test_g16_resume.py::test_resume_after_retraction",
        target="engine.scheduler.planner:Planner._admit",
        cut="request.prefill_tokens = len(request.ids)",
        becomes="request.prefill_tokens = request.prompt_tokens",
    ),
    Mutant(
        name="victim-stays-planned",
        origin="G17: vLLM issue 23347",
        bug="a request that was planned earlier in a step and is retracted later in it stays in the plan",
        signature="KeyError: 'scripted-1'",
        test=f"{GALLERY_TESTS}/test_g17_planned_victim.py::test_a_victim_leaves_the_plan",
        target="engine.scheduler.planner:Planner._make_room",
        cut="chosen.remove(victim)",
        becomes="pass",
    ),
    Mutant(
        name="retracted-request-loses-its-place",
        origin="G18: vLLM issue 41951",
        bug="a retracted request goes to the end of the queue, after all that came since",
        signature="overtaken by",
        test=f"{GALLERY_TESTS}/test_g18_place_in_the_queue.py::test_a_retracted_request_keeps_its_place",
        target="engine.scheduler.books:Books.enqueue",
        cut="request.place = WAITING",
        becomes=(
            "if request.retractions:\n"
            "        request.arrival = max((other.arrival for other in self.requests.values()), default=0) + 1\n"
            "    request.place = WAITING"
        ),
    ),
    Mutant(
        name="pause-does-not-stop-launches",
        origin="C06: what /pause_generation promises",
        bug="microbatches are launched while the engine is paused",
        signature="a microbatch was launched while paused",
        test="tests/registered/core/test_pauses.py::test_pause_in_place_freezes_and_resumes",
        target="engine.scheduler.planner:Planner.may_plan",
        cut="books.paused is not None or ",
    ),
    Mutant(
        name="victim-is-the-earliest",
        origin="B06: the latest arrival gives way",
        bug="the request that has worked longest is sent back to the queue, and then the next one",
        signature="an earlier request gave way",
        test="tests/registered/pressure/test_ballast.py::test_ballast_is_retracted_and_recovers",
        target="engine.scheduler.planner:Planner._latest",
        cut="(request.priority, -request.arrival)",
        becomes="request.arrival",
    ),
)
