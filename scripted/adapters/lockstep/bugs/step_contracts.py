"""Mutants of what a step launches: the order of the queue, tries, chunks, decodes and what is mixed."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.memory import KVMemory
from engine.scheduler import Request, planner, policy
from engine.scheduler.planner import Plan, Planner
from engine.scheduler.policy import FirstCome, HighestPriority, Policy
from scripted.adapters.lockstep.bugs.contract import contract

__all__ = ["STEP_CONTRACTS"]

_SMALL_CHUNK = 64

_plan = Planner.plan
_add_chunk = Planner._add_chunk
_add_decodes = Planner._add_decodes


class _LastCome(FirstCome):
    def order(self, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
        del memory
        return waiting[::-1]


def _last_come_first_served(name: str) -> Policy:
    del name
    return _LastCome()


def _uncounted_chunk(this: Planner, plan: Plan, request: Request) -> None:
    before = request.chunks_done
    _add_chunk(this, plan, request)
    request.chunks_done = before


def _count_every_pass(this: Planner, plan: Plan, request: Request) -> None:
    before, planned = request.chunks_done, request.planned_tokens
    _add_chunk(this, plan, request)
    request.chunks_done = before + (request.planned_tokens > planned)


def _plan_with(this: Planner, **changes: Any) -> Plan | None:
    kept = this._limits
    this._limits = msgspec.structs.replace(kept, **changes)
    try:
        return _plan(this)
    finally:
        this._limits = kept


def _always_mix(this: Planner) -> Plan | None:
    return _plan_with(this, mixed_chunk=True)


def _always_split(this: Planner) -> Plan | None:
    return _plan_with(this, prefill_budget_tokens=min(_SMALL_CHUNK, this._limits.prefill_budget_tokens))


def _never_mix(this: Planner, plan: Plan, most: int) -> None:
    if not plan.tokens:
        _add_decodes(this, plan, most)


def _fill_up_with_decodes(this: Planner, plan: Plan) -> None:
    this._add_prefill(plan)
    if plan.tokens and plan.room:
        _add_decodes(this, plan, min(plan.room, this._decode_share()))


def _never_overdue(this: Policy, request: Request) -> bool:
    del this, request
    return False


def _one_decode(this: Planner) -> int:
    return min(1, len(this._books.running))


def _decode_the_first(planner: Planner, plan: Plan, most: int) -> None:
    before = list(planner._books.running.items())
    _add_decodes(planner, plan, most)
    running = planner._books.running
    still = [(rid, request) for rid, request in before if rid in running]
    running.clear()
    running.update(still)


STEP_CONTRACTS = (
    contract(
        "newest-goes-first",
        "the queue is a stack",
        "assert ends == [0, 1, 2, 3]",
        "tests/registered/scheduling/test_policies.py::test_first_come_first_served",
        planner,
        "policy_named",
        _last_come_first_served,
    ),
    contract(
        "the-unmatched-starve",
        "under the lpm policy a prompt without a match waits for as long as others with one arrive",
        "overtook it, the bound is 16",
        "tests/registered/scheduling/test_policies.py::test_a_request_without_a_match_is_not_overtaken_for_ever",
        policy,
        "OVERTAKEN_LIMIT_REQUESTS",
        10**9,
    ),
    contract(
        "low-priority-starves",
        "a request of low priority waits for as long as others of a higher one arrive",
        "overtook it, the bound is 16",
        "tests/registered/scheduling/test_policies.py::test_a_request_of_low_priority_is_not_overtaken_for_ever",
        Policy,
        "is_overdue",
        _never_overdue,
    ),
    contract(
        "a-backlog-overtakes-the-urgent",
        "each of a backlog of low priority is owed a turn at the same time, and urgent requests wait for all of them",
        "low priority was served at places",
        "tests/registered/scheduling/test_policies.py::test_a_backlog_of_low_priority_takes_one_turn_at_a_time",
        HighestPriority,
        "overtaken_by",
        Policy.overtaken_by,
    ),
    contract(
        "chunks-keep-decodes-out",
        "with mixed_chunk a full chunk leaves nothing of the budget, so streams stall while a long prompt computes",
        "the stream stalls",
        "tests/registered/pipeline/test_decode_slots.py::test_a_stream_does_not_stall_beside_a_long_prompt",
        Planner,
        "_add_both",
        _fill_up_with_decodes,
    ),
    contract(
        "parts-are-not-counted",
        "the parts of a split prompt are not counted",
        "never got to chunk 2: it ended before",
        "test_one_stage.py::test_a_long_prompt_is_split",
        Planner,
        "_add_chunk",
        _uncounted_chunk,
    ),
    contract(
        "a-whole-prompt-counts-as-a-part",
        "a prompt that fits one pass counts as a part",
        "r.chunks_done == 0",
        "test_one_stage.py::test_a_short_prompt_takes_one_pass",
        Planner,
        "_add_chunk",
        _count_every_pass,
    ),
    contract(
        "decodes-always-join-a-prefill",
        "decodes fill a prefill microbatch although mixed_chunk is off",
        "assert 'mixed' == 'prefill'",
        "test_batches.py::test_forward_modes_without_mixing",
        Planner,
        "plan",
        _always_mix,
    ),
    contract(
        "decodes-never-join-a-prefill",
        "mixed_chunk changes nothing",
        "prefill, decode and mixed microbatches",
        "test_batches.py::test_batch_composition_is_disjoint",
        Planner,
        "_add_decodes",
        _never_mix,
    ),
    contract(
        "one-request-a-batch",
        "requests decode one after the other",
        "two requests in one decode batch",
        "test_one_stage.py::test_requests_decode_in_one_batch",
        Planner,
        "_decode_share",
        _one_decode,
    ),
    contract(
        "chunking-cannot-be-switched-off",
        "prompts are split although chunking is off",
        "assert 16 == 0",
        "tests/registered/chunked/test_boundaries.py::test_chunking_off_never_splits",
        Planner,
        "plan",
        _always_split,
    ),
    contract(
        "decodes-do-not-take-turns",
        "beside prompts that leave little room, those decode that began first, and the others wait",
        "some decode and others wait",
        "tests/registered/pipeline/test_decode_slots.py::test_decodes_beside_prompts_take_turns",
        Planner,
        "_add_decodes",
        _decode_the_first,
    ),
    contract(
        "one-try-less",
        "a step gives up the queue one request too early",
        "is starts",
        "tests/registered/scheduling/test_tries.py::test_fifteen_that_do_not_fit_are_passed_and_sixteen_are_not",
        planner,
        "ADMISSION_TRIES_LIMIT_REQUESTS",
        15,
    ),
)
