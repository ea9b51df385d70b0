"""Mutants that escaped: bugs that search and scripts passed before each step was compared with a specification.

They are part of the gallery, under a heading of their own. The search finds each of them unaided.
"""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

import msgspec

from engine.instruments import digest
from engine.memory import KVMemory
from engine.memory.node import Node
from engine.memory.radix import RadixTree
from engine.messages import CallAnswer, FinishReason, Generate, Refusal
from engine.plan import Microbatch
from engine.scheduler import Request, Scheduler
from engine.scheduler.books import Books
from engine.scheduler.flush_and_update import FlushAndUpdate
from engine.scheduler.planner import Planner
from scripted.core.mutant import Mutant

__all__ = ["ESCAPES"]

_TESTS = "tests/registered/invariants/test_escapes.py"

_enqueue = Books.enqueue
_ready = Planner._ready
_retract = Planner.retract
_admit = Planner._admit
_why_finished = Scheduler._why_finished
_answer_due = FlushAndUpdate.answer_due
_refusal_of = Scheduler.refusal_of


def _enqueue_and_remember(books: Books, request: Request) -> None:
    books.__dict__.setdefault("seen", {})[request.arrival] = request.rid
    _enqueue(books, request)


def _ready_but_the_second(planner: Planner) -> list[Request]:
    ready = _ready(planner)
    return ready[:1] + ready[2:]


def _one_page_more(memory: KVMemory, tokens: int) -> int:
    return tokens // memory._page_size + 1


def _most_recently_used(tree: RadixTree) -> Node | None:
    leaves = [node for node in tree.nodes() if not node.children and node.lock_ref == 0]
    return max(leaves, key=lambda node: node.last_used, default=None)


def _latest_of_all(planner: Planner, candidates: Iterable[Request]) -> Request:
    del planner
    return max(candidates, key=lambda request: request.arrival)


def _retract_and_draw_anew(planner: Planner, request: Request) -> None:
    request.spec = msgspec.structs.replace(request.spec, seed=request.spec.seed + 1)
    _retract(planner, request)


def _retract_and_forget_the_output(planner: Planner, request: Request) -> None:
    request.spec = msgspec.structs.replace(request.spec, prompt_tokens=len(request.ids))
    _retract(planner, request)


def _retract_and_count_the_prompt(planner: Planner, request: Request) -> None:
    planner._counters.prompt_tokens += request.prompt_tokens
    _retract(planner, request)


def _go_on_after_the_first(scheduler: Scheduler, request: Request, token: int) -> FinishReason | None:
    reason = _why_finished(scheduler, request, token)
    is_first = len(request.ids) == request.prompt_tokens + 1
    return None if reason is FinishReason.STOP and is_first and len(request.ids) < request.limit_tokens else reason


def _admit_and_add_the_hit(planner: Planner, request: Request) -> bool:
    before, admitted = request.cached_tokens, _admit(planner, request)
    if admitted and request.retractions:
        request.cached_tokens = before + request.prefill_start
    return admitted


def _without_pages(microbatch: Microbatch) -> list[object]:
    return [microbatch.id, microbatch.mode] + [
        (segment.rid, segment.row, segment.start, len(segment.token_ids), segment.emits)
        for segment in microbatch.segments
    ]


def _answer_after_the_deadline(calls: FlushAndUpdate, now: float) -> CallAnswer | None:
    return None if now == calls.deadline and not calls._books.is_quiescent else _answer_due(calls, now)


def _with_the_aborted(scheduler: Scheduler, message: Generate, *, queued: int = 0, **others: Any) -> Refusal | None:
    return _refusal_of(scheduler, message, queued=queued + scheduler.counters.requests_aborted, **others)


def _escape(
    name: str, bug: str, signature: str, test: str, owner: type | ModuleType, attribute: str, replacement: Any
) -> Mutant:
    return Mutant(
        name=name,
        origin="found by review of this project's own suites",
        bug=bug,
        signature=signature,
        test=f"{_TESTS}::{test}",
        owner=owner,
        attribute=attribute,
        replacement=replacement,
    )


ESCAPES = (
    _escape(
        "a-registry-grows",
        "the books remember every request for ever",
        "it has grown: scheduler.books.seen",
        "test_an_idle_engine_is_as_small_as_a_new_one",
        Books,
        "enqueue",
        _enqueue_and_remember,
    ),
    _escape(
        "a-neighbour-is-skipped",
        "the second of the requests that could decode is left out",
        "some did not decode",
        "test_all_that_can_decode_decode_in_one_microbatch",
        Planner,
        "_ready",
        _ready_but_the_second,
    ),
    _escape(
        "an-exact-fit-is-no-fit",
        "a prompt that ends with a page is counted one page more",
        "did not finish within",
        "test_a_prompt_that_fills_all_pages_runs",
        KVMemory,
        "pages_for",
        _one_page_more,
    ),
    _escape(
        "most-recently-used-goes-first",
        "eviction takes what was used last",
        "the wrong prefix was evicted",
        "test_what_was_not_used_for_longest_is_evicted",
        RadixTree,
        "_least_recently_used",
        _most_recently_used,
    ),
    _escape(
        "the-urgent-give-way",
        "the latest to arrive gives way, whatever its priority",
        "the urgent one gave way",
        "test_the_less_urgent_gives_way",
        Planner,
        "_latest",
        _latest_of_all,
    ),
    _escape(
        "a-seed-restarts",
        "after a retraction a request draws from another seed",
        "was told another sampling",
        "test_sampling_is_the_same_after_a_retraction",
        Planner,
        "retract",
        _retract_and_draw_anew,
    ),
    _escape(
        "penalties-forget-the-output",
        "after a retraction penalties count from where the request was",
        "was told another sampling",
        "test_sampling_is_the_same_after_a_retraction",
        Planner,
        "retract",
        _retract_and_forget_the_output,
    ),
    _escape(
        "the-first-token-never-stops",
        "a stop token ends a request only from its second token on",
        "assert 'length' == 'stop'",
        "test_a_stop_token_ends_a_request_wherever_it_comes",
        Scheduler,
        "_why_finished",
        _go_on_after_the_first,
    ),
    _escape(
        "hits-add-up",
        "what a request hits after a retraction is added to what it was told",
        "was told other hits",
        "test_hits_are_told_once",
        Planner,
        "_admit",
        _admit_and_add_the_hit,
    ),
    _escape(
        "a-statistic-drifts",
        "a prompt is counted again with each retraction",
        "the prompt was counted again",
        "test_a_retraction_counts_no_prompt",
        Planner,
        "retract",
        _retract_and_count_the_prompt,
    ),
    _escape(
        "a-digest-without-pages",
        "the digest of plans leaves the pages out",
        "the digest of plans leaves out",
        "test_digests_stand_for_every_field",
        digest,
        "_shape",
        _without_pages,
    ),
    _escape(
        "a-deadline-met-exactly-is-missed",
        "a call whose deadline is now is still waiting",
        "it was due",
        "test_a_deadline_that_is_met_exactly_is_over",
        FlushAndUpdate,
        "answer_due",
        _answer_after_the_deadline,
    ),
    _escape(
        "the-aborted-fill-the-queue",
        "requests that were aborted count against the limit of the queue",
        "the queue is full",
        "test_what_was_aborted_leaves_room_in_the_queue",
        Scheduler,
        "refusal_of",
        _with_the_aborted,
    ),
)
