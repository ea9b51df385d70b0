"""Mutants of the flush, of the weight update, and of the idle predicate that both ask."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["FLUSHING"]


FLUSHING: Final = (
    Mutant(
        name="flush-ignores-in-flight",
        origin="G01: SGLang pull request 27446",
        bug="the idle check does not see microbatches in flight, so a flush is accepted while a result is on its way",
        signature="This request holds the node from another tree",
        test="tests/registered/pipeline/test_flush_in_flight.py::test_flush_while_chunk_results_are_in_flight",
        target="engine.scheduler.books:Books.nothing_in_flight",
        cut="not self.in_flight and self.update is None",
        becomes="True",
    ),
    Mutant(
        name="flush-refused-by-the-queue",
        origin="G02: SGLang pull request 31962",
        bug="requests that wait and own no memory count as work, so after a pause (retract) every flush is refused",
        signature="flush refused: the engine is busy: waiting=",
        test=f"{GALLERY_TESTS}/test_g02_flush_after_pause.py::test_flush_while_all_wait_retracted",
        target="engine.scheduler.books:Books.is_quiescent",
        cut="return not memory_is_owned",
        becomes="return not self.waiting and not memory_is_owned",
    ),
    Mutant(
        name="second-deferred-flush-replaces-the-first",
        origin="G03: SGLang pull requests 21413 and 21490",
        bug="a second flush that may wait takes the place of the first, which is never answered",
        signature="the second deferred flush was not refused",
        test=f"{GALLERY_TESTS}/test_g03_two_deferred_flushes.py::test_second_deferred_flush_is_refused",
        target="engine.scheduler.flush_and_update:FlushAndUpdate.ask",
        cut="if self._deferred is not None:",
        becomes="if False:",
    ),
    Mutant(
        name="deferred-flush-has-no-deadline",
        origin="G03: the other side, A08",
        bug="a flush that waits for the engine never gives up",
        signature="the flush waits beyond its deadline",
        test=f"{GALLERY_TESTS}/test_g03_two_deferred_flushes.py::test_a_deferred_flush_gives_up_at_its_deadline",
        target="engine.scheduler.flush_and_update:FlushAndUpdate.answer_due",
        cut=" and now < self.deadline",
    ),
    Mutant(
        name="update-keeps-the-cache",
        origin="G07: LMDeploy issue 4917, NeMo-RL pull request 4018",
        bug="the weights are updated and the prefix tree stays, so KV of the old weights is still served",
        signature="KV of the old weights is still cached",
        test=f"{GALLERY_TESTS}/test_g07_weight_update.py::test_an_update_leaves_no_prefix_of_the_old_weights",
        target="engine.scheduler.flush_and_update:FlushAndUpdate.finish_update",
        cut="self._drop_cache()",
        becomes="0",
    ),
    Mutant(
        name="update-answered-as-launched",
        origin="G07: the other side, an answer is a promise about every stage",
        bug="an update that a stage could not do is answered with success, and the cache is dropped for nothing",
        signature="the update is said to have succeeded",
        test=f"{GALLERY_TESTS}/test_g07_weight_update.py::test_an_update_that_a_stage_fails_changes_nothing",
        target="engine.scheduler.flush_and_update:FlushAndUpdate.finish_update",
        cut="if error is not None:",
        becomes="if False:",
    ),
    Mutant(
        name="flush-answers-but-does-nothing",
        origin="D02: effects, not only answers",
        bug="a flush is answered with success and leaves the cache as it was",
        signature="the cache is still there",
        test="tests/registered/core/test_flushes.py::test_flush_forgets_a_prefix",
        target="engine.scheduler.flush_and_update:FlushAndUpdate._flush",
        cut="self._drop_cache()",
        becomes="self._memory.pages.cached",
    ),
)
