"""Mutants of plain contracts: no race of another engine, but what a test of the core suite must notice.

They are switched on like the gallery's and are not searched for: most of them break a promise that no invariant of a
scheduler knows, such as a priority that is lost.
"""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import msgspec

from engine.instruments import Pressure
from engine.limits import Limits
from engine.memory import KVMemory
from engine.memory.node import Node
from engine.memory.radix import RadixTree
from engine.memory.rows import RowPool
from engine.messages import (
    Abort,
    AbortAll,
    ContinueGeneration,
    EvictCache,
    FinishReason,
    Generate,
    OperatorEvent,
    TokenOutput,
)
from engine.plan import Microbatch
from engine.scheduler import Place, Request, Scheduler, planner, policy
from engine.scheduler import scheduler as scheduler_module
from engine.scheduler.admission import Admission
from engine.scheduler.books import Books
from engine.scheduler.controls import Controls
from engine.scheduler.counters import Counters
from engine.scheduler.planner import Plan, Planner
from engine.scheduler.policy import FirstCome, HighestPriority, Policy
from engine.scheduler.profiles import Profiles
from engine.scheduler.replies import output_of
from scripted.gallery.window_layers import WINDOW_LAYERS
from scripted.subject.mutant import Mutant

__all__ = ["CONTRACTS"]

_CORE = "tests/registered/core"
_SMALL_CHUNK = 64
_SMALL_HEAP = 32

_request_of = Admission.request_of
_microbatch = Controls.microbatch
_on_abort = Scheduler._on_abort
_on_abort_all = Scheduler._on_abort_all
_on_continue = Scheduler._on_continue
_admit = Planner._admit
_plan = Planner.plan
_add_chunk = Planner._add_chunk
_add_decodes = Planner._add_decodes
_apply = Pressure.apply
_offer_for_eviction = RadixTree._offer_for_eviction


def _fits(limits: Limits, prompt_tokens: int, max_new_tokens: int) -> None:
    del limits, prompt_tokens, max_new_tokens


def _abort_somebody(scheduler: Scheduler, abort: AbortAll) -> None:
    assert scheduler.books.requests, "there is nothing to abort"
    _on_abort_all(scheduler, abort)


def _abort_all_but_waiting(scheduler: Scheduler, abort: Abort) -> None:
    request = scheduler.find_request(abort.rid)
    if request is not None and request.place is Place.WAITING:
        scheduler._answer(abort.call_id or "", ok=True, message="aborted")
    else:
        _on_abort(scheduler, abort)


def _without_priority(admission: Admission, message: Generate, arrival: int) -> Request:
    return _request_of(admission, msgspec.structs.replace(message, priority=0), arrival)


def _without_minimum(admission: Admission, message: Generate, arrival: int) -> Request:
    sampling = msgspec.structs.replace(message.sampling, min_new_tokens=0)
    return _request_of(admission, msgspec.structs.replace(message, sampling=sampling), arrival)


def _without_logprobs(request: Request, **details: Any) -> TokenOutput:
    return output_of(request, **{**details, "logprob": None})


def _one_token_late(scheduler: Scheduler, request: Request, token: int) -> FinishReason | None:
    del scheduler
    if token in request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request.ids) > request.limit_tokens else None


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


def _admit_and_tell_every_hit(this: Planner, request: Request) -> bool:
    admitted = _admit(this, request)
    if admitted:
        request.cached_tokens = min(request.prefill_start, request.prompt_tokens)
    return admitted


def _never_overdue(this: Policy, request: Request) -> bool:
    del this, request
    return False


def _one_decode(this: Planner) -> int:
    return min(1, len(this._books.running))


def _no_prefix(tree: RadixTree, *looked_up: object) -> tuple[Any, list[int]]:
    del looked_up
    return tree.root, []


def _say_no_more(books: Books) -> str:
    del books
    return "busy"


def _continue_what_is_paused(scheduler: Scheduler, message: ContinueGeneration) -> None:
    assert scheduler.books.paused is not None, "nothing is paused"
    _on_continue(scheduler, message)


def _decode_the_first(planner: Planner, plan: Plan, most: int) -> None:
    before = list(planner._books.running.items())
    _add_decodes(planner, plan, most)
    running = planner._books.running
    still = [(rid, request) for rid, request in before if rid in running]
    running.clear()
    running.update(still)


def _keep_no_rows(rows: RowPool, count: int) -> None:
    del rows, count


def _free_rows(pressure: Pressure) -> int:
    return pressure._rows.free


def _evict_before(pressure: Pressure, event: OperatorEvent) -> None:
    _apply(pressure, EvictCache())
    _apply(pressure, event)


def _thin_to_nothing(tree: RadixTree, node: Node) -> None:
    _offer_for_eviction(tree, node)
    if len(tree._heap) > _SMALL_HEAP:
        tree._heap.clear()


def _count_any_end(counters: Counters, reason: FinishReason) -> None:
    del reason
    counters.requests_finished += 1


def _only_when_not_paused(controls: Controls, number: int) -> Microbatch | None:
    return _microbatch(controls, number) if controls._books.paused is None else None


def _is_never_open(profiles: Profiles) -> bool:
    del profiles
    return False


def _contract(
    name: str, bug: str, signature: str, test: str, owner: type | ModuleType, attribute: str, replacement: Any
) -> Mutant:
    where = test if "/" in test else f"{_CORE}/{test}"
    return Mutant(
        name=name,
        origin="a contract of the core suite",
        bug=bug,
        signature=signature,
        test=where,
        owner=owner,
        attribute=attribute,
        replacement=replacement,
    )


CONTRACTS = (
    _contract(
        "what-never-fits-is-admitted",
        "a request that can never run is let into the queue",
        "assert refused is not None",
        "tests/registered/gallery/test_g26_context_length.py::test_a_prompt_that_fills_the_context_is_refused",
        Limits,
        "why_never_fits",
        _fits,
    ),
    _contract(
        "abort-all-of-nothing-kills",
        "aborting all while nothing is alive takes the scheduler down",
        "there is nothing to abort",
        "test_aborts.py::test_abort_all_of_nothing",
        Scheduler,
        "_on_abort_all",
        _abort_somebody,
    ),
    _contract(
        "waiting-requests-are-not-aborted",
        "an abort is answered, but a request in the queue stays there",
        "assert None == 'abort'",
        "tests/registered/abort/test_unusual_aborts.py::test_abort_before_the_first_step",
        Scheduler,
        "_on_abort",
        _abort_all_but_waiting,
    ),
    _contract(
        "priority-is-lost",
        "a request's priority does not reach the scheduler",
        "r.req.priority == 7",
        "test_handles.py::test_priority_is_carried",
        Admission,
        "request_of",
        _without_priority,
    ),
    _contract(
        "minimum-length-is-ignored",
        "stop tokens end a request before its minimum",
        "len(held.output_ids) >= 5",
        "test_handles.py::test_min_new_tokens_holds_a_stop_back",
        Admission,
        "request_of",
        _without_minimum,
    ),
    _contract(
        "logprobs-are-lost",
        "tokens come without the logprobs that were asked for",
        "len(asked.logprobs) == 3",
        "test_handles.py::test_logprobs_come_with_the_tokens",
        scheduler_module,
        "output_of",
        _without_logprobs,
    ),
    _contract(
        "one-token-late",
        "a request ends one token after its limit",
        "== [1, 2, 17]",
        "test_handles.py::test_ignore_eos_runs_to_the_exact_length",
        Scheduler,
        "_why_finished",
        _one_token_late,
    ),
    _contract(
        "newest-goes-first",
        "the queue is a stack",
        "assert ends == [0, 1, 2, 3]",
        "tests/registered/scheduling/test_policies.py::test_first_come_first_served",
        planner,
        "policy_named",
        _last_come_first_served,
    ),
    _contract(
        "the-unmatched-starve",
        "under the lpm policy a prompt without a match waits for as long as others with one arrive",
        "overtook it, the bound is 16",
        "tests/registered/scheduling/test_policies.py::test_a_request_without_a_match_is_not_overtaken_for_ever",
        policy,
        "OVERTAKEN_LIMIT_REQUESTS",
        10**9,
    ),
    _contract(
        "low-priority-starves",
        "a request of low priority waits for as long as others of a higher one arrive",
        "overtook it, the bound is 16",
        "tests/registered/scheduling/test_policies.py::test_a_request_of_low_priority_is_not_overtaken_for_ever",
        Policy,
        "is_overdue",
        _never_overdue,
    ),
    _contract(
        "a-backlog-overtakes-the-urgent",
        "each of a backlog of low priority is owed a turn at the same time, and urgent requests wait for all of them",
        "low priority was served at places",
        "tests/registered/scheduling/test_policies.py::test_a_backlog_of_low_priority_takes_one_turn_at_a_time",
        HighestPriority,
        "overtaken_by",
        Policy.overtaken_by,
    ),
    _contract(
        "own-tokens-count-as-hits",
        "what a request computed itself and finds again after a retraction is told as cached",
        "its own tokens were counted as hits",
        "test_memory_accounts.py::test_what_a_request_computed_itself_is_no_hit",
        Planner,
        "_admit",
        _admit_and_tell_every_hit,
    ),
    _contract(
        "chunks-keep-decodes-out",
        "with mixed_chunk a full chunk leaves nothing of the budget, so streams stall while a long prompt computes",
        "the stream stalls",
        "tests/registered/pipeline/test_decode_slots.py::test_a_stream_does_not_stall_beside_a_long_prompt",
        Planner,
        "_add_both",
        _fill_up_with_decodes,
    ),
    _contract(
        "parts-are-not-counted",
        "the parts of a split prompt are not counted",
        "never got to chunk 2: it ended before",
        "test_one_stage.py::test_a_long_prompt_is_split",
        Planner,
        "_add_chunk",
        _uncounted_chunk,
    ),
    _contract(
        "a-whole-prompt-counts-as-a-part",
        "a prompt that fits one pass counts as a part",
        "r.chunks_done == 0",
        "test_one_stage.py::test_a_short_prompt_takes_one_pass",
        Planner,
        "_add_chunk",
        _count_every_pass,
    ),
    _contract(
        "decodes-always-join-a-prefill",
        "decodes fill a prefill microbatch although mixed_chunk is off",
        "assert 'mixed' == 'prefill'",
        "test_batches.py::test_forward_modes_without_mixing",
        Planner,
        "plan",
        _always_mix,
    ),
    _contract(
        "decodes-never-join-a-prefill",
        "mixed_chunk changes nothing",
        "prefill, decode and mixed microbatches",
        "test_batches.py::test_batch_composition_is_disjoint",
        Planner,
        "_add_decodes",
        _never_mix,
    ),
    _contract(
        "one-request-a-batch",
        "requests decode one after the other",
        "two requests in one decode batch",
        "test_one_stage.py::test_requests_decode_in_one_batch",
        Planner,
        "_decode_share",
        _one_decode,
    ),
    _contract(
        "chunking-cannot-be-switched-off",
        "prompts are split although chunking is off",
        "assert 16 == 0",
        "tests/registered/chunked/test_boundaries.py::test_chunking_off_never_splits",
        Planner,
        "plan",
        _always_split,
    ),
    _contract(
        "prefixes-are-never-hit",
        "a cached prefix is computed again",
        "cached_tokens",
        "test_memory_accounts.py::test_a_warm_prefix_is_used",
        RadixTree,
        "match",
        _no_prefix,
    ),
    _contract(
        "refusal-names-no-counts",
        "a refused flush does not say what is in its way",
        "assert 'waiting=1' in",
        "test_flushes.py::test_flush_is_refused_with_the_counts",
        Books,
        "what_is_busy",
        _say_no_more,
    ),
    _contract(
        "continue-needs-a-pause",
        "a continue without a pause takes the scheduler down",
        "nothing is paused",
        "test_pauses.py::test_continue_without_a_pause_changes_nothing",
        Scheduler,
        "_on_continue",
        _continue_what_is_paused,
    ),
    _contract(
        "decodes-do-not-take-turns",
        "beside prompts that leave little room, those decode that began first, and the others wait",
        "some decode and others wait",
        "tests/registered/pipeline/test_decode_slots.py::test_decodes_beside_prompts_take_turns",
        Planner,
        "_add_decodes",
        _decode_the_first,
    ),
    _contract(
        "rows-are-not-kept-back",
        "pressure on rows keeps none",
        "t.state.rows.free == 1",
        "test_pressure_verbs.py::test_rows_are_exhausted_and_released",
        RowPool,
        "reserve",
        _keep_no_rows,
    ),
    _contract(
        "kept-rows-count-as-owned",
        "rows that the operator keeps back are taken for those of requests, so pressure cannot go back up",
        "exhaust_rows(leave_rows) is at most",
        "test_pressure_verbs.py::test_what_cannot_be_left_is_refused_with_the_most_that_can",
        Pressure,
        "most_free_rows",
        property(_free_rows),
    ),
    _contract(
        "pressure-evicts-everything",
        "pressure empties the cache before it looks whether it must",
        "== (10, 4)",
        "test_pressure_verbs.py::test_exhausting_evicts_only_what_it_must",
        Pressure,
        "apply",
        _evict_before,
    ),
    _contract(
        "thinning-forgets-leaves",
        "the heap of leaves to evict is emptied when it grows, with what is still to be evicted in it",
        "assert 1 == 3",
        "tests/registered/pressure/test_eviction.py::test_a_prefix_that_is_used_often_hides_no_other",
        RadixTree,
        "_offer_for_eviction",
        _thin_to_nothing,
    ),
    _contract(
        "aborts-count-as-finished",
        "an abort is counted as an end like any other",
        "requests_aborted",
        "test_memory_accounts.py::test_totals_are_what_the_clients_saw",
        Counters,
        "count_end",
        _count_any_end,
    ),
    _contract(
        "two-profiles-at-once",
        "a call for a profile does not wait for the answer to the one before",
        "another profile call",
        "test_profile_calls.py::test_one_profile_at_a_time",
        Profiles,
        "is_open",
        property(_is_never_open),
    ),
    _contract(
        "a-pause-holds-profiles-up",
        "a profile is not begun while generation is paused",
        "the predicate never held",
        "test_profile_calls.py::test_a_pause_does_not_hold_a_profile_up",
        Controls,
        "microbatch",
        _only_when_not_paused,
    ),
    _contract(
        "one-try-less",
        "a step gives up the queue one request too early",
        "is starts",
        "tests/registered/scheduling/test_tries.py::test_fifteen_that_do_not_fit_are_passed_and_sixteen_are_not",
        planner,
        "ADMISSION_TRIES_LIMIT_REQUESTS",
        15,
    ),
    *WINDOW_LAYERS,
)
