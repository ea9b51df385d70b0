"""Mutants of admission and planning: who may start, what a microbatch may hold, when a request ends."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from engine.memory import KVMemory
from engine.messages import Generate, Refusal, RefusalKind
from engine.scheduler import Request
from engine.scheduler.admission import Admission
from engine.scheduler.planner import Plan, Planner
from engine.scheduler.policy import HighestPriority, LongestPrefix
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["PLANNING"]

_admissions = Planner._admissions
_add_chunk = Planner._add_chunk
_add_prefill = Planner._add_prefill
_add_segment = Planner._add_segment
_request_of = Admission.request_of
_refusal_of = Admission.refusal_of


def _admissions_up_to_a_miss(planner: Planner) -> Iterator[Request]:
    for request in _admissions(planner):
        yield request
        if request.lease is None:
            return


def _admissions_that_count_for_the_head(planner: Planner) -> Iterator[Request]:
    missed: list[Request] = []
    for request in _admissions(planner):
        counts = [one.overtaken for one in missed[1:]]
        yield request
        for one, count in zip(missed[1:], counts, strict=True):
            one.overtaken = count
        if request.lease is None:
            missed.append(request)


def _admissions_without_a_bound(planner: Planner) -> Iterator[Request]:
    for request in _admissions(planner):
        yield request
        request.overtaken = 0


def _add_chunk_of_the_whole_budget(planner: Planner, plan: Plan, request: Request) -> None:
    planned, plan.tokens = plan.tokens, 0
    _add_chunk(planner, plan, request)
    plan.tokens += planned


def _add_prefill_into_a_free_row(planner: Planner, plan: Plan) -> None:
    if planner._memory.rows.free:
        _add_prefill(planner, plan)


def _request_without_a_context(admission: Admission, message: Generate, arrival: int) -> Request:
    request = _request_of(admission, message, arrival)
    request.limit_tokens = len(message.prompt_ids) + message.sampling.max_new_tokens
    return request


def _refuse_no_full_queue(admission: Admission, *args: Any, **details: Any) -> Refusal | None:
    refusal = _refusal_of(admission, *args, **details)
    return None if refusal is not None and refusal.kind is RefusalKind.BUSY else refusal


def _every_running_request(planner: Planner) -> list[Request]:
    return list(planner._books.running.values())


def _emit_with_every_chunk(
    planner: Planner, plan: Plan, request: Request, start: int, end: int, *, emits: bool, **details: Any
) -> None:
    del emits
    _add_segment(planner, plan, request, start, end, emits=True, **details)


def _all_running_requests(planner: Planner) -> int:
    return len(planner._books.running)


def _in_order_of_arrival(policy: LongestPrefix, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
    del policy, memory
    return waiting


def _lowest_priority_first(policy: HighestPriority, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
    del policy, memory
    return sorted(waiting, key=lambda request: (request.priority, request.arrival))


PLANNING = (
    Mutant(
        name="head-blocks-the-queue",
        origin="G19: vLLM issue 35541 and pypto serving",
        bug="a request that does not fit stops all that come after it",
        signature="no request got past the one that does not fit",
        test=f"{GALLERY_TESTS}/test_g19_oversize_head.py::test_small_requests_get_past_one_that_does_not_fit",
        owner=Planner,
        attribute="_admissions",
        replacement=_admissions_up_to_a_miss,
    ),
    Mutant(
        name="head-is-passed-over-for-ever",
        origin="G19: the other side, B10",
        bug="a request that does not fit yet is passed over without a bound and starves",
        signature="requests got past it",
        test=f"{GALLERY_TESTS}/test_g19_oversize_head.py::test_passing_over_has_a_bound",
        owner=Planner,
        attribute="_admissions",
        replacement=_admissions_without_a_bound,
    ),
    Mutant(
        name="only-the-head-is-passed-over",
        origin="G19: found by scripted explore when it learned to press on the pool, B10",
        bug="passing over is counted only for the first request that does not fit; later ones starve",
        signature="requests got past it",
        test=f"{GALLERY_TESTS}/test_g19_oversize_head.py::test_the_second_in_line_has_the_bound_too",
        owner=Planner,
        attribute="_admissions",
        replacement=_admissions_that_count_for_the_head,
    ),
    Mutant(
        name="budget-is-counted-per-request",
        origin="G20: TensorRT-LLM issue 13318",
        bug="each prompt gets the whole token budget of the microbatch, which the batch then exceeds",
        signature="tokens, the budget is",
        test=f"{GALLERY_TESTS}/test_g20_token_budget.py::test_a_batch_keeps_to_its_budget",
        owner=Planner,
        attribute="_add_chunk",
        replacement=_add_chunk_of_the_whole_budget,
    ),
    Mutant(
        name="chunk-waits-for-a-free-row",
        origin="G22: SGLang pull request 23006",
        bug="the next chunk asks for a free row, but the request itself holds the only one",
        signature="did not finish within",
        test=f"{GALLERY_TESTS}/test_g22_one_row.py::test_a_split_prompt_advances_in_the_only_row",
        owner=Planner,
        attribute="_add_prefill",
        replacement=_add_prefill_into_a_free_row,
    ),
    Mutant(
        name="context-length-does-not-clamp",
        origin="G26: pypto serving",
        bug="a request may grow beyond context_length",
        signature="beyond context_length",
        test=f"{GALLERY_TESTS}/test_g26_context_length.py::test_context_length_ends_a_request",
        owner=Admission,
        attribute="request_of",
        replacement=_request_without_a_context,
    ),
    Mutant(
        name="queue-has-no-limit",
        origin="C07: back-pressure at the queue's limit",
        bug="the queue takes more requests than max_queued_requests",
        signature="the queue took one too many",
        test="tests/registered/core/test_queue_limit.py::test_one_more_than_the_queue_holds_is_refused",
        owner=Admission,
        attribute="refusal_of",
        replacement=_refuse_no_full_queue,
    ),
    Mutant(
        name="decode-runs-twice",
        origin="B12: a running request is in at most one microbatch in flight",
        bug="a decode is launched again before the token of the last one is back",
        signature="is in two microbatches in flight",
        test="tests/registered/pipeline/test_decode_slots.py::test_a_running_request_is_in_one_microbatch",
        owner=Planner,
        attribute="_ready",
        replacement=_every_running_request,
    ),
    Mutant(
        name="one-big-decode-batch",
        origin="the pipeline's own rule: decodes are spread over the stages",
        bug="all running requests go into one microbatch, and the other stages idle",
        signature="never reached 'four decode microbatches in flight at once'",
        test="tests/registered/pipeline/test_decode_slots.py::test_a_running_request_is_in_one_microbatch",
        owner=Planner,
        attribute="_decode_share",
        replacement=_all_running_requests,
    ),
    Mutant(
        name="every-chunk-emits-a-token",
        origin="B02: only the last part of a prompt yields a token",
        bug="the result of each part of a split prompt is taken for a token of the answer",
        signature="the prompt was cut into",
        test="tests/registered/chunked/test_boundaries.py::test_boundaries_on_one_stage",
        owner=Planner,
        attribute="_add_segment",
        replacement=_emit_with_every_chunk,
    ),
    Mutant(
        name="longest-prefix-is-not-asked",
        origin="B17: longest prefix match",
        bug="the queue is served in order of arrival, whatever is cached",
        signature="the cached prompt had to wait",
        test="tests/registered/scheduling/test_policies.py::test_longest_prefix_match",
        owner=LongestPrefix,
        attribute="order",
        replacement=_in_order_of_arrival,
    ),
    Mutant(
        name="priority-is-upside-down",
        origin="B17: priorities; the field knows both directions",
        bug="the lowest number is served first, where the highest should be",
        signature="the urgent request had to wait",
        test="tests/registered/scheduling/test_policies.py::test_highest_priority_first",
        owner=HighestPriority,
        attribute="order",
        replacement=_lowest_priority_first,
    ),
)
