"""Mutants of what a step launches: the order of the queue, tries, chunks, decodes and what is mixed."""

from __future__ import annotations

import functools
from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["STEP_CONTRACTS"]

_CORE: Final = "tests/registered/core"
_SCHEDULING: Final = "tests/registered/scheduling"
_of: Final = functools.partial(Mutant, origin="a contract of the core suite")


STEP_CONTRACTS: Final = (
    _of(
        name="newest-goes-first",
        bug="the queue is a stack",
        signature="assert ends == [0, 1, 2, 3]",
        test=f"{_SCHEDULING}/test_policies.py::test_first_come_first_served",
        target="engine.scheduler.policy:FirstCome.order",
        cut="return waiting",
        becomes="return waiting[::-1]",
    ),
    _of(
        name="the-unmatched-starve",
        bug="under the lpm policy a prompt without a match waits for as long as others with one arrive",
        signature="overtook it, the bound is 16",
        test=f"{_SCHEDULING}/test_policies.py::test_a_request_without_a_match_is_not_overtaken_for_ever",
        target="engine.scheduler.policy:OVERTAKEN_LIMIT_REQUESTS",
        replacement=10**9,
    ),
    _of(
        name="low-priority-starves",
        bug="a request of low priority waits for as long as others of a higher one arrive",
        signature="overtook it, the bound is 16",
        test=f"{_SCHEDULING}/test_policies.py::test_a_request_of_low_priority_is_not_overtaken_for_ever",
        target="engine.scheduler.policy:Policy.is_overdue",
        cut="request.overtaken >= OVERTAKEN_LIMIT_REQUESTS",
        becomes="False",
    ),
    _of(
        name="a-backlog-overtakes-the-urgent",
        bug=(
            "each of a backlog of low priority is owed a turn at the same time, "
            "and urgent requests wait for all of them"
        ),
        signature="low priority was served at places",
        test=f"{_SCHEDULING}/test_policies.py::test_a_backlog_of_low_priority_takes_one_turn_at_a_time",
        target="engine.scheduler.policy:HighestPriority.overtaken_by",
        cut="if waiting and waiting[0].arrival < started.arrival:\n        yield waiting[0]",
        becomes="yield from Policy.overtaken_by(self, started, waiting)",
    ),
    _of(
        name="chunks-keep-decodes-out",
        bug="with mixed_chunk a full chunk leaves nothing of the budget, so streams stall while a long prompt computes",
        signature="the stream stalls",
        test="tests/registered/pipeline/test_decode_slots.py::test_a_stream_does_not_stall_beside_a_long_prompt",
        target="engine.scheduler.planner:Planner._add_both",
        cut="len(self._choose_decodes(min(self._decode_share(), budget - least, plan.seats - 1)))",
        becomes="0",
    ),
    _of(
        name="parts-are-not-counted",
        bug="the parts of a split prompt are not counted",
        signature="never got to chunk 2: it ended before",
        test=f"{_CORE}/test_one_stage.py::test_a_long_prompt_is_split",
        target="engine.scheduler.planner:Planner._add_chunk",
        cut="request.chunks_done += 1",
        becomes="pass",
    ),
    _of(
        name="a-whole-prompt-counts-as-a-part",
        bug="a prompt that fits one pass counts as a part",
        signature="r.chunks_done == 0",
        test=f"{_CORE}/test_one_stage.py::test_a_short_prompt_takes_one_pass",
        target="engine.scheduler.planner:Planner._add_chunk",
        cut="if not (last and start == request.prefill_start):",
        becomes="if True:",
    ),
    _of(
        name="decodes-always-join-a-prefill",
        bug="decodes fill a prefill microbatch although mixed_chunk is off",
        signature="assert 'mixed' == 'prefill'",
        test=f"{_CORE}/test_batches.py::test_forward_modes_without_mixing",
        target="engine.scheduler.planner:Planner.plan",
        cut="if self._limits.mixed_chunk:",
        becomes="if True:",
    ),
    _of(
        name="decodes-never-join-a-prefill",
        bug="mixed_chunk changes nothing",
        signature="prefill, decode and mixed microbatches",
        test=f"{_CORE}/test_batches.py::test_batch_composition_is_disjoint",
        target="engine.scheduler.planner:Planner.plan",
        cut="if self._limits.mixed_chunk:",
        becomes="if False:",
    ),
    _of(
        name="one-request-a-batch",
        bug="requests decode one after the other",
        signature="two requests in one decode batch",
        test=f"{_CORE}/test_one_stage.py::test_requests_decode_in_one_batch",
        target="engine.scheduler.planner:Planner._decode_share",
        cut="self._most_requests",
        becomes="1",
    ),
    _of(
        name="chunking-cannot-be-switched-off",
        bug="prompts are split although chunking is off",
        signature="assert 16 == 0",
        test="tests/registered/chunked/test_boundaries.py::test_chunking_off_never_splits",
        target="engine.scheduler.planner:Planner.plan",
        cut="Plan(self._limits.prefill_budget_tokens, self._most_requests)",
        becomes="Plan(min(64, self._limits.prefill_budget_tokens), self._most_requests)",
    ),
    _of(
        name="decodes-do-not-take-turns",
        bug="beside prompts that leave little room, those decode that began first, and the others wait",
        signature="some decode and others wait",
        test="tests/registered/pipeline/test_decode_slots.py::test_decodes_beside_prompts_take_turns",
        target="engine.scheduler.planner:Planner._add_decodes",
        cut="running[request.rid] = running.pop(request.rid)",
        becomes="pass",
    ),
    _of(
        name="one-try-less",
        bug="a step gives up the queue one request too early",
        signature="is starts",
        test=f"{_SCHEDULING}/test_tries.py::test_fifteen_that_do_not_fit_are_passed_and_sixteen_are_not",
        target="engine.scheduler.planner:ADMISSION_TRIES_LIMIT_REQUESTS",
        replacement=15,
    ),
)
