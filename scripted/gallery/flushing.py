"""Mutants of the flush and of the idle predicate that it asks."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from engine.messages import CallAnswer, FlushCache
from engine.scheduler import Books
from engine.scheduler.flushes import Flushes
from scripted.gallery.mutant import GALLERY_TESTS, Mutant

__all__ = ["FLUSHING"]

_is_quiescent = Books.is_quiescent
_ask = Flushes.ask
_answer_due = Flushes.answer_due


def _nothing_is_in_flight(books: Books) -> bool:
    del books
    return True


def _is_quiescent_and_nobody_waits(books: Books) -> bool:
    return not books.waiting and bool(_is_quiescent.__get__(books))


def _ask_in_place_of_the_first(flushes: Flushes, flush: FlushCache, now: float) -> CallAnswer | None:
    flushes._deferred = None
    return _ask(flushes, flush, now)


def _answer_without_a_flush(flushes: Flushes, flush: FlushCache) -> CallAnswer:
    return CallAnswer(call_id=flush.call_id, ok=True, message=f"flushed {flushes._memory.pages.cached} cached pages")


def _answer_at_idle_only(flushes: Flushes, now: float) -> CallAnswer | None:
    del now
    return _answer_due(flushes, float("-inf"))


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
        replacement=property(_is_quiescent_and_nobody_waits),
    ),
    Mutant(
        name="second-deferred-flush-replaces-the-first",
        origin="G03: SGLang pull requests 21413 and 21490",
        bug="a second flush that may wait takes the place of the first, which is never answered",
        signature="the second deferred flush was not refused",
        test=f"{GALLERY_TESTS}/test_g03_two_deferred_flushes.py::test_second_deferred_flush_is_refused",
        owner=Flushes,
        attribute="ask",
        replacement=_ask_in_place_of_the_first,
    ),
    Mutant(
        name="deferred-flush-has-no-deadline",
        origin="G03: the other side, A08",
        bug="a flush that waits for the engine never gives up",
        signature="the flush waits beyond its deadline",
        test=f"{GALLERY_TESTS}/test_g03_two_deferred_flushes.py::test_a_deferred_flush_gives_up_at_its_deadline",
        owner=Flushes,
        attribute="answer_due",
        replacement=_answer_at_idle_only,
    ),
    Mutant(
        name="flush-answers-but-does-nothing",
        origin="D02: effects, not only answers",
        bug="a flush is answered with success and leaves the cache as it was",
        signature="the cache is still there",
        test="tests/registered/core/test_flushes.py::test_flush_forgets_a_prefix",
        owner=Flushes,
        attribute="_flush",
        replacement=_answer_without_a_flush,
    ),
)
