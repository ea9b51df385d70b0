"""Mutants of the flush, of the weight update, and of the idle predicate that both ask."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from engine.memory import KVMemory
from engine.messages import CallAnswer, FlushCache
from engine.scheduler import Books
from engine.scheduler.flush_and_update import FlushAndUpdate
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["FLUSHING"]

_is_quiescent = Books.is_quiescent
_ask = FlushAndUpdate.ask
_answer_due = FlushAndUpdate.answer_due
_finish_update = FlushAndUpdate.finish_update


def _nothing_is_in_flight(books: Books) -> bool:
    del books
    return True


def _is_quiescent_and_nothing_waits(books: Books) -> bool:
    return not books.waiting and bool(_is_quiescent.__get__(books))


def _ask_in_place_of_the_first(calls: FlushAndUpdate, flush: FlushCache, now: float) -> CallAnswer | None:
    calls._deferred = None
    return _ask(calls, flush, now)


def _answer_without_a_flush(calls: FlushAndUpdate, flush: FlushCache) -> CallAnswer:
    return CallAnswer(call_id=flush.call_id, ok=True, message=f"flushed {calls._memory.pages.cached} cached pages")


def _finish_update_without_a_flush(calls: FlushAndUpdate, error: str | None) -> CallAnswer:
    memory, calls._memory = calls._memory, KVMemory(total_pages=1, page_size=1, rows=1, radix_cache=True)
    try:
        return _finish_update(calls, error)
    finally:
        calls._memory = memory


def _finish_update_whatever_came(calls: FlushAndUpdate, error: str | None) -> CallAnswer:
    del error
    return _finish_update(calls, None)


def _answer_at_idle_only(calls: FlushAndUpdate, now: float) -> CallAnswer | None:
    del now
    return _answer_due(calls, float("-inf"))


FLUSHING = (
    Mutant(
        name="flush-ignores-in-flight",
        origin="G01: SGLang pull request 27446",
        bug="the idle check does not see microbatches in flight, so a flush is accepted while a result is on its way",
        signature="This request holds the node from another tree",
        test="tests/registered/pipeline/test_flush_in_flight.py::test_flush_while_chunk_results_are_in_flight",
        owner=Books,
        attribute="nothing_in_flight",
        replacement=property(_nothing_is_in_flight),
    ),
    Mutant(
        name="flush-refused-by-the-queue",
        origin="G02: SGLang pull request 31962",
        bug="requests that wait and own no memory count as work, so after a pause (retract) every flush is refused",
        signature="flush refused: the engine is busy: waiting=",
        test=f"{GALLERY_TESTS}/test_g02_flush_after_pause.py::test_flush_while_all_wait_retracted",
        owner=Books,
        attribute="is_quiescent",
        replacement=property(_is_quiescent_and_nothing_waits),
    ),
    Mutant(
        name="second-deferred-flush-replaces-the-first",
        origin="G03: SGLang pull requests 21413 and 21490",
        bug="a second flush that may wait takes the place of the first, which is never answered",
        signature="the second deferred flush was not refused",
        test=f"{GALLERY_TESTS}/test_g03_two_deferred_flushes.py::test_second_deferred_flush_is_refused",
        owner=FlushAndUpdate,
        attribute="ask",
        replacement=_ask_in_place_of_the_first,
    ),
    Mutant(
        name="deferred-flush-has-no-deadline",
        origin="G03: the other side, A08",
        bug="a flush that waits for the engine never gives up",
        signature="the flush waits beyond its deadline",
        test=f"{GALLERY_TESTS}/test_g03_two_deferred_flushes.py::test_a_deferred_flush_gives_up_at_its_deadline",
        owner=FlushAndUpdate,
        attribute="answer_due",
        replacement=_answer_at_idle_only,
    ),
    Mutant(
        name="update-keeps-the-cache",
        origin="G07: LMDeploy issue 4917, NeMo-RL pull request 4018",
        bug="the weights are updated and the prefix tree stays, so KV of the old weights is still served",
        signature="KV of the old weights is still cached",
        test=f"{GALLERY_TESTS}/test_g07_weight_update.py::test_an_update_leaves_no_prefix_of_the_old_weights",
        owner=FlushAndUpdate,
        attribute="finish_update",
        replacement=_finish_update_without_a_flush,
    ),
    Mutant(
        name="update-answered-as-launched",
        origin="G07: the other side, an answer is a promise about every stage",
        bug="an update that a stage could not do is answered with success, and the cache is dropped for nothing",
        signature="the update is said to have succeeded",
        test=f"{GALLERY_TESTS}/test_g07_weight_update.py::test_an_update_that_a_stage_fails_changes_nothing",
        owner=FlushAndUpdate,
        attribute="finish_update",
        replacement=_finish_update_whatever_came,
    ),
    Mutant(
        name="flush-answers-but-does-nothing",
        origin="D02: effects, not only answers",
        bug="a flush is answered with success and leaves the cache as it was",
        signature="the cache is still there",
        test="tests/registered/core/test_flushes.py::test_flush_forgets_a_prefix",
        owner=FlushAndUpdate,
        attribute="_flush",
        replacement=_answer_without_a_flush,
    ),
)
