"""Mutants of the one way in which a request ends: aborts, disconnects, and what is freed when."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["ENDING"]


ENDING: Final = (
    Mutant(
        name="abort-waits-for-a-token",
        origin="G04: miles pull request 1585",
        bug="an abort only marks a running request, which ends with its next token; paused in place, it never comes",
        signature="did not finish within",
        test=f"{GALLERY_TESTS}/test_g04_abort_while_frozen.py::test_abort_of_a_request_paused_in_place",
        target="engine.scheduler.scheduler:Scheduler._on_abort",
        cut="if request is not None:",
        becomes=(
            "if request is not None and request.place is RUNNING:\n"
            "        request.limit_tokens = len(request.ids) + 1  # It ends with its next token, if there is one.\n"
            "    elif request is not None:"
        ),
    ),
    Mutant(
        name="pause-abort-keeps-half-a-prompt",
        origin="G06: sglang-jax pull request 984",
        bug="pause (abort) ends a half-prefilled request without giving its row and pages back",
        signature="a half-prefilled request kept its row",
        test=f"{GALLERY_TESTS}/test_g06_pause_abort_mid_prompt.py::test_pause_abort_of_a_half_prefilled_request",
        target="engine.scheduler.scheduler:Scheduler._free",
        cut="self.memory.release(request.lease)",
        becomes=(
            "if request.planned_tokens >= request.prefill_tokens or self.books.paused is not PauseMode.ABORT:\n"
            "        self.memory.release(request.lease)"
        ),
    ),
    Mutant(
        name="abort-frees-a-shared-page-twice",
        origin="G08: SGLang issue 38981",
        bug="two chunks meet in one page, and an abort between them frees that page once for each",
        signature="is FREE, not HELD",
        test=f"{GALLERY_TESTS}/test_g08_chunks_share_a_page.py::test_abort_between_chunks_that_share_a_page",
        target="engine.scheduler.scheduler:Scheduler._free",
        cut="self.memory.release(request.lease)",
        becomes=(
            "full_pages, rest = divmod(request.planned_tokens, self.limits.page_size)\n"
            "    if rest and request.planned_tokens < request.prefill_tokens:\n"
            "        # The chunk to come begins in this page.\n"
            "        self.memory.pages.release([request.lease.pages[full_pages]])\n"
            "    self.memory.release(request.lease)"
        ),
    ),
    Mutant(
        name="token-after-the-end",
        origin="G09: SGLang issue 34112 and pull request 37295",
        bug="the result of a request that was aborted in flight is streamed",
        signature="a token was emitted after the end",
        test=f"{GALLERY_TESTS}/test_g09_abort_final_chunk.py::test_abort_while_the_final_chunk_is_in_flight",
        target="engine.scheduler.scheduler:Scheduler._on_token",
        cut="self._release_if_landed(request)",
        becomes=(
            "else:\n"
            "        from engine.messages import TokenOutput\n"
            "        self._replies.append(TokenOutput(rid=request.rid, token_ids=(token,)))\n"
            "    self._release_if_landed(request)"
        ),
    ),
    Mutant(
        name="dropped-result-leaks-its-slot",
        origin="G09: SGLang issue 34112 and pull request 37295, the first fix",
        bug="the result of an aborted request is dropped without giving its row and pages back",
        signature="releasing=1",
        test=f"{GALLERY_TESTS}/test_g09_abort_final_chunk.py::test_an_aborted_request_gives_its_slot_back",
        target="engine.scheduler.scheduler:Scheduler._release_if_landed",
        cut="if request.place is RELEASING:",
        becomes="if False:",
    ),
    Mutant(
        name="disconnect-aborts-nothing",
        origin="G10: SGLang issue 36333 and pull request 35255",
        bug="the request of a client that went away is not aborted, so it decodes to its limit",
        signature="did not finish within",
        test=f"{GALLERY_TESTS}/test_g10_disconnect.py::test_a_client_that_went_away_costs_no_steps",
        target="engine.scheduler.scheduler:Scheduler._on_abort",
        cut="if request is not None:",
        becomes="if request is not None and abort.call_id is not None:",
    ),
    Mutant(
        name="abort-matches-by-prefix",
        origin="G11: SGLang pull request 35936",
        bug="an abort of batch_1 cancels batch_10 as well",
        signature="batch_10 went down with batch_1",
        test=f"{GALLERY_TESTS}/test_g11_abort_exact_rid.py::test_abort_of_the_shorter_rid",
        target="engine.scheduler.scheduler:Scheduler._on_abort",
        cut="request = self.books.requests.get(abort.rid)",
        becomes=(
            "for rid in [one for one in self.books.requests if one != abort.rid and one.startswith(abort.rid)]:\n"
            "        self._end(self.books.requests[rid], FinishReason.ABORT)\n"
            "    request = self.books.requests.get(abort.rid)"
        ),
    ),
    Mutant(
        name="abort-ignores-in-flight",
        origin="G12: vLLM issue 6586",
        bug="an abort takes a request's memory at once, and its result meets a request without any",
        signature="owned no memory while it was in flight",
        test=f"{GALLERY_TESTS}/test_g12_abort_in_flight.py::test_abort_of_one_of_two_requests_in_flight",
        target="engine.scheduler.scheduler:Scheduler._end",
        cut="elif request.in_flight:",
        becomes="elif False:",
    ),
    Mutant(
        name="abort-and-finish-free-twice",
        origin="G13: mini-sglang pull request 111",
        bug="an abort frees a request that is in flight, and its last result frees it again",
        signature="is released twice",
        test=f"{GALLERY_TESTS}/test_g13_abort_meets_finish.py::test_abort_around_the_finishing_step",
        target="engine.scheduler.scheduler:Scheduler._end",
        cut="self.books.releasing.append(request)",
        becomes="self.books.releasing.append(request)\n        self.memory.release(request.lease)",
    ),
    Mutant(
        name="finished-requests-stay-registered",
        origin="G25: pypto serving",
        bug="finished requests are never taken out of the registry",
        signature="are still registered",
        test=f"{GALLERY_TESTS}/test_g25_registry.py::test_a_hundred_requests_leave_the_registry",
        target="engine.scheduler.scheduler:Scheduler._end",
        cut="del self.books.requests[request.rid]",
        becomes="pass",
    ),
    Mutant(
        name="abort-all-overlooks-the-dispatched",
        origin="B11: requests that only a microbatch in flight knows of",
        bug="abort all walks the queues and overlooks a request whose last chunk is in flight",
        signature="a dispatched request outlived abort_all",
        test="tests/registered/core/test_aborts.py::test_abort_all_reaches_every_place",
        target="engine.scheduler.scheduler:Scheduler._on_abort_all",
        cut="for request in live:",
        becomes="for request in [one for one in live if one.place is not DISPATCHED]:",
    ),
    Mutant(
        name="abort-of-an-unknown-rid-kills",
        origin="B11: aborts are idempotent",
        bug="an abort of an unknown rid takes the scheduler down",
        signature="KeyError: 'no-such-rid'",
        test="tests/registered/abort/test_unusual_aborts.py::test_an_unknown_rid",
        target="engine.scheduler.scheduler:Scheduler._on_abort",
        cut="self.books.requests.get(abort.rid)",
        becomes="self.books.requests[abort.rid]",
    ),
    Mutant(
        name="stop-token-is-ignored",
        origin="C02: stop ids",
        bug="a request goes on after a token that should have stopped it",
        signature="it went on after its stop token",
        test="tests/registered/core/test_handles.py::test_every_finish_reason",
        target="engine.scheduler.scheduler:Scheduler._why_finished",
        cut="if token in request.stop_ids:",
        becomes="if False:",
    ),
)
