"""Bugs that vLLM's scheduler really had, put back into the installed version. Each names where it was fixed upstream.

In our own words: what was wrong, not how it was written.
"""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

import functools
from typing import Any, Final

from vllm.v1.core.kv_cache_coordinator import UnitaryKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager
from vllm.v1.request import Request

from scripted.adapters.vllm.surgery import without
from scripted.core.mutant import Mutant

__all__ = ["MUTANTS"]

_TEST: Final = "tests/registered/vllm_scheduler/test_vllm_track_record.py::test_the_search_finds"

_preempt = Scheduler._preempt_request
_reset_prefix_cache = Scheduler.reset_prefix_cache
_make_cached_request_data = Scheduler._make_cached_request_data
_update_from_output = Scheduler.update_from_output
_update_with_output = AsyncScheduler._update_request_with_output
_allocate_slots = KVCacheManager.allocate_slots
_find_longest_cache_hit = UnitaryKVCacheCoordinator.find_longest_cache_hit
_allocate_new_blocks = SingleTypeKVCacheManager.allocate_new_blocks
_precedes = Request.__lt__


def _preempt_without_a_word_on_what_is_in_flight(
    scheduler: Scheduler, request: Request, timestamp: float, **details: Any
) -> None:
    placeholders = request.num_output_placeholders
    _preempt(scheduler, request, timestamp, **details)
    request.num_output_placeholders = placeholders
    request.num_stale_output_tokens = 0
    request.drop_stale_output = False


def _reset_that_forgets_all_frames_but_one(
    scheduler: Scheduler, reset_running_requests: bool = False, reset_connector: bool = False
) -> bool:
    running = list(scheduler.running)
    done: bool = _reset_prefix_cache(scheduler, reset_running_requests, reset_connector)
    frame = 1 + scheduler.num_spec_tokens
    for request in running if reset_running_requests else ():
        if request.num_output_tokens and request.num_stale_output_tokens % frame == 0:
            request.num_stale_output_tokens = min(request.num_stale_output_tokens, frame)
    return done


def _update_that_drops_the_next_output(
    scheduler: AsyncScheduler, request: Request, new_token_ids: list[int], is_stale: bool = False
) -> tuple[list[int], bool]:
    if request.drop_stale_output and not is_stale:
        request.drop_stale_output = False
        return [], False
    updated: tuple[list[int], bool] = _update_with_output(scheduler, request, new_token_ids, is_stale=is_stale)
    return updated


def _allocate_that_touches_first(manager: KVCacheManager, request: Request, *args: Any, **details: Any) -> Any:
    allocated = _allocate_slots(manager, request, *args, **details)
    hit = details.get("new_computed_blocks")
    if allocated is None and hit is not None:
        for blocks in hit.blocks:
            manager.block_pool.touch(blocks)
    return allocated


def _hit_of_the_whole_prompt(
    coordinator: UnitaryKVCacheCoordinator, block_hashes: Any, max_cache_hit_length: int
) -> Any:
    return _find_longest_cache_hit(coordinator, block_hashes, max_cache_hit_length + 1)


def _precedes_only_if_they_differ(request: Request, other: Request) -> bool:
    if (request.priority, request.arrival_time) == (other.priority, other.arrival_time):
        raise TypeError("'<' not supported between instances of 'Request' and 'Request'")
    return bool(_precedes(request, other))


def _new_blocks_that_are_noted_for_ever(manager: SingleTypeKVCacheManager, *args: Any) -> Any:
    blocks = _allocate_new_blocks(manager, *args)
    noted = manager.__dict__.setdefault("noted_block_ids", [])
    noted += [block.block_id for block in blocks]
    return blocks


def _update_that_keeps_what_has_stopped(scheduler: Scheduler, plan: Any, output: Any) -> Any:
    outputs = _update_from_output(scheduler, plan, output)
    stopped = {one.request_id for each in outputs.values() for one in each.outputs if one.finish_reason is not None}
    kept = scheduler.__dict__.setdefault("kept_request_data", {})
    kept |= {rid: plan for rid in plan.scheduled_cached_reqs.req_ids if rid in stopped}
    return outputs


def _cached_data_without_tokens(scheduler: Scheduler, *args: Any) -> CachedRequestData:
    data = _make_cached_request_data(scheduler, *args)
    if scheduler.scheduler_config.async_scheduling:
        data.all_token_ids = {rid: ids for rid, ids in data.all_token_ids.items() if rid not in data.resumed_req_ids}
    return data


def _cached_data_with_the_first_tokens(scheduler: Scheduler, *args: Any) -> CachedRequestData:
    data, planned = _make_cached_request_data(scheduler, *args), args[2]
    if scheduler.scheduler_config.async_scheduling:
        ends = {rid: start + planned[rid] for rid, start in zip(data.req_ids, data.num_computed_tokens, strict=True)}
        data.all_token_ids = {rid: ids[: ends[rid]] for rid, ids in data.all_token_ids.items()}
    return data


_of = functools.partial(Mutant, test=_TEST)

MUTANTS: Final[tuple[Mutant, ...]] = (
    _of(
        name="preempted-stays-in-the-plan",
        origin="vllm issue 23347, pull request 23713",
        bug="a request that was planned and then preempted in the same step for a higher priority stays in the plan",
        signature="AssertionError in schedule",
        owner=Scheduler,
        attribute="schedule",
        replacement=without(Scheduler.schedule, "scheduled_running_reqs.remove("),
    ),
    _of(
        name="guesses-of-the-preempted",
        origin="vllm pull request 28558",
        bug="the guesses of a request that was planned and then preempted in the same step stay in the plan",
        signature="which it computes nothing of",
        owner=Scheduler,
        attribute="schedule",
        replacement=without(Scheduler.schedule, "scheduled_spec_decode_tokens.pop("),
    ),
    _of(
        name="preempted-while-in-flight",
        origin="vllm issue 41190, pull requests 47900 and 48245",
        bug="a preemption resets the counters of a request, but its output in flight is still counted against them",
        signature="but alone it says",
        owner=Scheduler,
        attribute="_preempt_request",
        replacement=_preempt_without_a_word_on_what_is_in_flight,
    ),
    _of(
        name="flush-forgets-older-frames",
        origin="vllm pull request 46066",
        bug="a flush that preempts drops one output in flight of each request, although there are more",
        signature="AssertionError in",
        owner=Scheduler,
        attribute="reset_prefix_cache",
        replacement=_reset_that_forgets_all_frames_but_one,
    ),
    _of(
        name="flush-drops-the-next-token",
        origin="vllm issue 42043, pull request 42117",
        bug="the first output after a flush that preempts is dropped, although nothing was in flight at the flush",
        signature="but alone it says",
        owner=AsyncScheduler,
        attribute="_update_request_with_output",
        replacement=_update_that_drops_the_next_output,
    ),
    _of(
        name="touched-before-it-fits",
        origin="vllm issue 11562, pull request 11565",
        bug="cached blocks are taken for a request before it is known whether the rest of it fits",
        signature="blocks_free is",
        owner=KVCacheManager,
        attribute="allocate_slots",
        replacement=_allocate_that_touches_first,
    ),
    _of(
        name="whole-prompt-hit",
        origin="vllm pull request 11186",
        bug="a prompt that is cached as a whole has no token left to compute",
        signature="AssertionError in schedule",
        owner=UnitaryKVCacheCoordinator,
        attribute="find_longest_cache_hit",
        replacement=_hit_of_the_whole_prompt,
    ),
    _of(
        name="stopped-while-it-waits",
        origin="vllm pull request 20739",
        bug="a request that was preempted while its last token was in flight ends, and stays in the waiting queue",
        signature="Invalid request status: FINISHED",
        owner=Scheduler,
        attribute="update_from_output",
        replacement=without(Scheduler.update_from_output, "self.waiting.remove_requests(stopped_preempted_reqs)"),
    ),
    _of(
        name="equals-cannot-be-compared",
        origin="vllm issue 29747, pull request 29764",
        bug="two requests of one priority that arrived at the same time cannot be ordered",
        signature="TypeError in",
        owner=Request,
        attribute="__lt__",
        replacement=_precedes_only_if_they_differ,
    ),
    _of(
        name="noted-blocks-are-never-forgotten",
        origin="vllm issue 44175, pull request 44490",
        bug="every new block is noted for the worker, and the notes are never taken away",
        signature="noted_block_ids has",
        owner=SingleTypeKVCacheManager,
        attribute="allocate_new_blocks",
        replacement=_new_blocks_that_are_noted_for_ever,
    ),
    _of(
        name="stopped-requests-are-kept",
        origin="vllm pull request 17567",
        bug="the plan data of a request that has just stopped goes back into a registry that nothing removes it from",
        signature="kept_request_data has",
        owner=Scheduler,
        attribute="update_from_output",
        replacement=_update_that_keeps_what_has_stopped,
    ),
    _of(
        name="resumed-without-its-tokens",
        origin="vllm pull request 26385",
        bug="the runner is not told the tokens of a request that is resumed under asynchronous scheduling",
        signature="without its blocks or its tokens",
        owner=Scheduler,
        attribute="_make_cached_request_data",
        replacement=_cached_data_without_tokens,
    ),
    _of(
        name="resumed-with-its-first-tokens",
        origin="vllm pull request 28787",
        bug="the runner is told only the first tokens of a request that is resumed in chunks",
        signature="those in flight included",
        owner=Scheduler,
        attribute="_make_cached_request_data",
        replacement=_cached_data_with_the_first_tokens,
    ),
)
