"""Mutants of the one way in which a request ends: aborts, disconnects, and what is freed when."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from typing import Any

from engine.messages import Abort, AbortAll, FinishReason, PauseMode, TokenLogprob, TokenOutput
from engine.scheduler import Place, Request, Scheduler
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["ENDING"]

_on_abort = Scheduler._on_abort
_on_token = Scheduler._on_token
_end = Scheduler._end
_free = Scheduler._free
_release_if_landed = Scheduler._release_if_landed


def _mark_running_requests(scheduler: Scheduler, abort: Abort) -> None:
    request = scheduler.find_request(abort.rid)
    if request is None or request.place is not Place.RUNNING:
        _on_abort(scheduler, abort)
    else:
        request.limit_tokens = len(request.ids) + 1  # It ends with its next token, if there is one.


def _abort_calls_only(scheduler: Scheduler, abort: Abort) -> None:
    if abort.call_id is not None:
        _on_abort(scheduler, abort)


def _abort_by_prefix(scheduler: Scheduler, abort: Abort) -> None:
    for rid in [rid for rid in scheduler.books.requests if rid != abort.rid and rid.startswith(abort.rid)]:
        _on_abort(scheduler, Abort(rid=rid))
    _on_abort(scheduler, abort)


def _free_all_but_half_prefilled(scheduler: Scheduler, request: Request) -> None:
    half = request.planned_tokens < request.prefill_tokens
    if half and scheduler.books.paused is PauseMode.ABORT:
        request.lease = None
        request.place = Place.GONE
    else:
        _free(scheduler, request)


def _free_by_segments(scheduler: Scheduler, request: Request) -> None:
    page_size = scheduler.limits.page_size
    lease, computed = request.lease, request.planned_tokens
    assert lease is not None
    if computed < request.prefill_tokens and computed % page_size:
        scheduler.memory.pages.release([lease.pages[computed // page_size]])  # The chunk to come begins in this page.
    _free(scheduler, request)


def _show_tokens_of_the_ended(scheduler: Scheduler, request: Request, token: int, logprob: TokenLogprob | None) -> None:
    if request.is_finished:
        scheduler._replies.append(TokenOutput(rid=request.rid, token_ids=(token,)))
    _on_token(scheduler, request, token, logprob)


def _never_release(scheduler: Scheduler, request: Request) -> None:
    if request.place is not Place.RELEASING:
        _release_if_landed(scheduler, request)


def _end_as_if_landed(scheduler: Scheduler, request: Request, reason: FinishReason, **details: Any) -> None:
    flying, request.in_flight = request.in_flight, 0
    _end(scheduler, request, reason, **details)
    request.in_flight = flying


def _end_and_release_at_once(scheduler: Scheduler, request: Request, reason: FinishReason, **details: Any) -> None:
    _end(scheduler, request, reason, **details)
    if request.place is Place.RELEASING and request.lease is not None:
        scheduler.memory.release(request.lease)


def _end_but_stay_registered(scheduler: Scheduler, request: Request, reason: FinishReason, **details: Any) -> None:
    _end(scheduler, request, reason, **details)
    scheduler.books.requests[request.rid] = request


def _abort_all_but_dispatched(scheduler: Scheduler, abort: AbortAll) -> None:
    requests = list(scheduler.books.requests.values())
    for request in requests:
        if request.place is not Place.DISPATCHED:
            _end(scheduler, request, FinishReason.ABORT)
    if abort.call_id is not None:
        scheduler._answer(abort.call_id, ok=True, message=f"aborted {len(requests)} requests")


def _abort_who_must_be_there(scheduler: Scheduler, abort: Abort) -> None:
    assert scheduler.books.requests[abort.rid].rid == abort.rid
    _on_abort(scheduler, abort)


def _finished_by_length_only(scheduler: Scheduler, request: Request, token: int) -> FinishReason | None:
    del scheduler, token
    return FinishReason.LENGTH if len(request.ids) >= request.limit_tokens else None


ENDING = (
    Mutant(
        name="abort-waits-for-a-token",
        origin="G04: miles pull request 1585",
        bug="an abort only marks a running request, which ends with its next token; paused in place, it never comes",
        signature="did not finish within",
        test=f"{GALLERY_TESTS}/test_g04_abort_while_frozen.py::test_abort_of_a_request_paused_in_place",
        owner=Scheduler,
        attribute="_on_abort",
        replacement=_mark_running_requests,
    ),
    Mutant(
        name="pause-abort-keeps-half-a-prompt",
        origin="G06: sglang-jax pull request 984",
        bug="pause (abort) ends a half-prefilled request without giving its row and pages back",
        signature="a half-prefilled request kept its row",
        test=f"{GALLERY_TESTS}/test_g06_pause_abort_mid_prompt.py::test_pause_abort_of_a_half_prefilled_request",
        owner=Scheduler,
        attribute="_free",
        replacement=_free_all_but_half_prefilled,
    ),
    Mutant(
        name="abort-frees-a-shared-page-twice",
        origin="G08: SGLang issue 38981",
        bug="two chunks meet in one page, and an abort between them frees that page once for each",
        signature="is FREE, not HELD",
        test=f"{GALLERY_TESTS}/test_g08_chunks_share_a_page.py::test_abort_between_chunks_that_share_a_page",
        owner=Scheduler,
        attribute="_free",
        replacement=_free_by_segments,
    ),
    Mutant(
        name="token-after-the-end",
        origin="G09: SGLang issue 34112 and pull request 37295",
        bug="the result of a request that was aborted in flight is streamed",
        signature="a token was emitted after the end",
        test=f"{GALLERY_TESTS}/test_g09_abort_final_chunk.py::test_abort_while_the_final_chunk_is_in_flight",
        owner=Scheduler,
        attribute="_on_token",
        replacement=_show_tokens_of_the_ended,
    ),
    Mutant(
        name="dropped-result-leaks-its-slot",
        origin="G09: SGLang issue 34112 and pull request 37295, the first fix",
        bug="the result of an aborted request is dropped without giving its row and pages back",
        signature="releasing=1",
        test=f"{GALLERY_TESTS}/test_g09_abort_final_chunk.py::test_an_aborted_request_gives_its_slot_back",
        owner=Scheduler,
        attribute="_release_if_landed",
        replacement=_never_release,
    ),
    Mutant(
        name="disconnect-aborts-nothing",
        origin="G10: SGLang issue 36333 and pull request 35255",
        bug="the request of a client that went away is not aborted, so it decodes to its limit",
        signature="did not finish within",
        test=f"{GALLERY_TESTS}/test_g10_disconnect.py::test_a_client_that_went_away_costs_no_steps",
        owner=Scheduler,
        attribute="_on_abort",
        replacement=_abort_calls_only,
    ),
    Mutant(
        name="abort-matches-by-prefix",
        origin="G11: SGLang pull request 35936",
        bug="an abort of batch_1 cancels batch_10 as well",
        signature="batch_10 went down with batch_1",
        test=f"{GALLERY_TESTS}/test_g11_abort_exact_rid.py::test_abort_of_the_shorter_rid",
        owner=Scheduler,
        attribute="_on_abort",
        replacement=_abort_by_prefix,
    ),
    Mutant(
        name="abort-ignores-in-flight",
        origin="G12: vLLM issue 6586",
        bug="an abort takes a request's memory at once, and its result meets a request without any",
        signature="owned no memory while it was in flight",
        test=f"{GALLERY_TESTS}/test_g12_abort_in_flight.py::test_abort_of_one_of_two_requests_in_flight",
        owner=Scheduler,
        attribute="_end",
        replacement=_end_as_if_landed,
    ),
    Mutant(
        name="abort-and-finish-free-twice",
        origin="G13: mini-sglang pull request 111",
        bug="an abort frees a request that is in flight, and its last result frees it again",
        signature="is released twice",
        test=f"{GALLERY_TESTS}/test_g13_abort_meets_finish.py::test_abort_around_the_finishing_step",
        owner=Scheduler,
        attribute="_end",
        replacement=_end_and_release_at_once,
    ),
    Mutant(
        name="finished-requests-stay-registered",
        origin="G25: pypto serving",
        bug="finished requests are never taken out of the registry",
        signature="are still registered",
        test=f"{GALLERY_TESTS}/test_g25_registry.py::test_a_hundred_requests_leave_the_registry",
        owner=Scheduler,
        attribute="_end",
        replacement=_end_but_stay_registered,
    ),
    Mutant(
        name="abort-all-overlooks-the-dispatched",
        origin="B11: requests that only a microbatch in flight knows of",
        bug="abort all walks the queues and overlooks a request whose last chunk is in flight",
        signature="a dispatched request outlived abort_all",
        test="tests/registered/core/test_aborts.py::test_abort_all_reaches_every_place",
        owner=Scheduler,
        attribute="_on_abort_all",
        replacement=_abort_all_but_dispatched,
    ),
    Mutant(
        name="abort-of-an-unknown-rid-kills",
        origin="B11: aborts are idempotent",
        bug="an abort of an unknown rid takes the scheduler down",
        signature="KeyError: 'no-such-rid'",
        test="tests/registered/abort/test_unusual_aborts.py::test_an_unknown_rid",
        owner=Scheduler,
        attribute="_on_abort",
        replacement=_abort_who_must_be_there,
    ),
    Mutant(
        name="stop-token-is-ignored",
        origin="C02: stop ids",
        bug="a request goes on after a token that should have stopped it",
        signature="it went on after its stop token",
        test="tests/registered/core/test_handles.py::test_every_finish_reason",
        owner=Scheduler,
        attribute="_why_finished",
        replacement=_finished_by_length_only,
    ),
)
