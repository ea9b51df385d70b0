"""Bugs that vLLM's scheduler really had, put back into the installed version. Each names where it was fixed upstream.

In our own words: what was wrong, not how it was written. Of vLLM's source only the statements that are cut stand here.
"""

from __future__ import annotations

import functools
from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["MUTANTS"]

_SCHEDULER: Final = "vllm.v1.core.sched.scheduler:Scheduler"
_of: Final = functools.partial(
    Mutant, test="tests/registered/vllm_scheduler/test_vllm_track_record.py::test_the_search_finds"
)

MUTANTS: Final[tuple[Mutant, ...]] = (
    _of(
        name="preempted-stays-in-the-plan",
        origin="vllm issue 23347, pull request 23713",
        bug="a request that was planned and then preempted in the same step for a higher priority stays in the plan",
        signature="AssertionError in schedule",
        target=f"{_SCHEDULER}.schedule",
        cut="scheduled_running_reqs.remove(preempted_req)",
        becomes="pass",
    ),
    _of(
        name="guesses-of-the-preempted",
        origin="vllm pull request 28558",
        bug="the guesses of a request that was planned and then preempted in the same step stay in the plan",
        signature="which it computes nothing of",
        target=f"{_SCHEDULER}.schedule",
        cut="scheduled_spec_decode_tokens.pop(preempted_req_id, None)",
        becomes="pass",
    ),
    _of(
        name="preempted-while-in-flight",
        origin="vllm issue 41190, pull requests 47900 and 48245",
        bug="a preemption resets the counters of a request, but its output in flight is still counted against them",
        signature="but alone it says",
        target=f"{_SCHEDULER}._preempt_request",
        cut="request.num_stale_output_tokens = request.num_in_flight_tokens\n    request.num_output_placeholders = 0",
        becomes="request.num_stale_output_tokens, request.drop_stale_output = 0, False",
    ),
    _of(
        name="flush-forgets-older-frames",
        origin="vllm pull request 46066",
        bug="a flush that preempts drops one output in flight of each request, although there are more",
        signature="AssertionError in",
        target=f"{_SCHEDULER}.reset_prefix_cache",
        cut="self._preempt_request(request, timestamp, drop_stale_output=True)",
        becomes=(
            "self._preempt_request(request, timestamp, drop_stale_output=True)\n"
            "            frame = 1 + self.num_spec_tokens\n"
            "            if request.num_output_tokens and request.num_stale_output_tokens % frame == 0:\n"
            "                request.num_stale_output_tokens = min(request.num_stale_output_tokens, frame)"
        ),
    ),
    _of(
        name="flush-drops-the-next-token",
        origin="vllm issue 42043, pull request 42117",
        bug="the first output after a flush that preempts is dropped, although nothing was in flight at the flush",
        signature="but alone it says",
        target="vllm.v1.core.sched.async_scheduler:AsyncScheduler._update_request_with_output",
        cut="status_before_update = request.status",
        becomes=(
            "if request.drop_stale_output and not is_stale:\n"
            "        request.drop_stale_output = False\n"
            "        return [], False\n"
            "    status_before_update = request.status"
        ),
    ),
    _of(
        name="touched-before-it-fits",
        origin="vllm issue 11562, pull request 11565",
        bug="cached blocks are taken for a request before it is known whether the rest of it fits",
        signature="blocks_free is",
        target="vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots",
        cut="if required_blocks > self.block_pool.get_num_free_blocks():",
        becomes=(
            "if required_blocks > self.block_pool.get_num_free_blocks():\n"
            "            for blocks in new_computed_block_list:\n"
            "                self.block_pool.touch(blocks)"
        ),
    ),
    _of(
        name="whole-prompt-hit",
        origin="vllm pull request 11186",
        bug="a prompt that is cached as a whole has no token left to compute",
        signature="AssertionError in schedule",
        target="vllm.v1.core.kv_cache_coordinator:UnitaryKVCacheCoordinator.find_longest_cache_hit",
        cut="max_length=max_cache_hit_length",
        becomes="max_length=max_cache_hit_length + 1",
    ),
    _of(
        name="stopped-while-it-waits",
        origin="vllm pull request 20739",
        bug="a request that was preempted while its last token was in flight ends, and stays in the waiting queue",
        signature="Invalid request status: FINISHED",
        target=f"{_SCHEDULER}.update_from_output",
        cut="self.waiting.remove_requests(stopped_preempted_reqs)",
        becomes="pass",
        kind="put back in part",
        note="the bug was broader than the one statement of its fix that is cut",
    ),
    _of(
        name="equals-cannot-be-compared",
        origin="vllm issue 29747, pull request 29764",
        bug="two requests of one priority that arrived at the same time cannot be ordered",
        signature="TypeError in",
        target="vllm.v1.request:Request.__lt__",
        cut="return self.request_id < other.request_id",
        becomes="""raise TypeError("'<' not supported between instances of 'Request' and 'Request'")""",
    ),
    _of(
        name="noted-blocks-are-never-forgotten",
        origin="vllm issue 44175, pull request 44490",
        bug="every new block is noted for the worker, and the notes are never taken away",
        signature="noted_block_ids has",
        target="vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager.allocate_new_blocks",
        cut="req_blocks.extend(new_blocks)",
        becomes=(
            "req_blocks.extend(new_blocks)\n"
            '        self.__dict__.setdefault("noted_block_ids", []).extend([one.block_id for one in new_blocks])'
        ),
        kind="imitated",
        note="the list that grows is the mutant's own; vLLM empties its list in every step now",
    ),
    _of(
        name="stopped-requests-are-kept",
        origin="vllm pull request 17567",
        bug="the plan data of a request that has just stopped goes back into a registry that nothing removes it from",
        signature="kept_request_data has",
        target=f"{_SCHEDULER}.update_from_output",
        cut="stopped_running_reqs.add(request)",
        becomes=(
            "stopped_running_reqs.add(request)\n"
            '                self.__dict__.setdefault("kept_request_data", {})[request.request_id] = scheduler_output'
        ),
        kind="imitated",
        note="the registry is the mutant's own; vLLM has none any more",
    ),
    _of(
        name="resumed-without-its-tokens",
        origin="vllm pull request 26385",
        bug="the runner is not told the tokens of a request that is resumed under asynchronous scheduling",
        signature="without its blocks or its tokens",
        target=f"{_SCHEDULER}._make_cached_request_data",
        cut="if req_id not in self.prev_step_scheduled_req_ids:",
        becomes=(
            "is_untold = self.scheduler_config.async_scheduling and req_id in resumed_req_ids\n"
            "            if req_id not in self.prev_step_scheduled_req_ids and not is_untold:"
        ),
    ),
    _of(
        name="resumed-with-its-first-tokens",
        origin="vllm pull request 28787",
        bug="the runner is told only the first tokens of a request that is resumed in chunks",
        signature="those in flight included",
        target=f"{_SCHEDULER}._make_cached_request_data",
        cut="all_token_ids[req_id] = req.all_token_ids.copy()",
        becomes=(
            "end = req.num_computed_tokens + num_scheduled_tokens[req_id]\n"
            "                is_async = self.scheduler_config.async_scheduling\n"
            "                all_token_ids[req_id] = req.all_token_ids[: end if is_async else None]"
        ),
    ),
)
