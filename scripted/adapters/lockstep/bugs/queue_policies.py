"""Mutants of the walk through the prefix tree, of the bound on a microbatch's requests and of dynamic chunk sizes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.memory import KVMemory
from engine.scheduler import Request
from engine.scheduler.chunk_sizes import ChunkSizes
from engine.scheduler.depth_first import depth_first
from engine.scheduler.planner import Plan, Planner
from engine.scheduler.policy import DepthFirst
from scripted.core.mutant import Mutant

__all__ = ["QUEUE_POLICIES"]

_SCHEDULING: Final = "tests/registered/scheduling"

_may_start = Planner._may_start  # noqa: SLF001 - a mutant reaches into what it breaks
_part = ChunkSizes.part


def _longest_branch_first(policy: DepthFirst, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
    late = {one: not policy.is_overdue(one) for one in waiting}
    hits = {one: memory.cached_tokens(one.ids, one.hit_limit_tokens, one.kv_key) for one in waiting}
    return sorted(waiting, key=lambda one: (late[one], -hits[one], one.arrival))


def _walk_without_a_bound(policy: DepthFirst, waiting: Sequence[Request], memory: KVMemory) -> Sequence[Request]:
    del policy
    return depth_first(waiting, memory)


def _may_start_beside_no_chunk(planner: Planner, request: Request, plan: Plan) -> bool:
    most = planner._limits.microbatch_requests  # noqa: SLF001
    beside = any(segment.start for segment in plan.segments)
    return _may_start(planner, request, plan) and not (most is not None and beside and len(plan.requests) >= most - 1)


def _may_start_if_few_run(planner: Planner, request: Request, plan: Plan) -> bool:
    most = planner._limits.microbatch_requests  # noqa: SLF001
    running = len(planner._books.running) + len(plan.requests)  # noqa: SLF001
    return _may_start(planner, request, plan) and (most is None or running < most)


def _decode_share_of_all(planner: Planner) -> int:
    return -(-len(planner._books.running) // planner._limits.pp_size)  # noqa: SLF001


def _part_without_a_prefix(sizes: ChunkSizes, prefix: int, rest: int, *, room: int, spent: int = 0) -> int:
    del prefix
    return _part(sizes, 0, rest, room=room, spent=spent)


def _part_with_a_sliver(sizes: ChunkSizes, prefix: int, rest: int, *, room: int, spent: int = 0) -> int:
    return min(rest, _part(sizes, prefix, 1 << 30, room=room, spent=spent))


def _part_of_its_own(sizes: ChunkSizes, prefix: int, rest: int, *, room: int, spent: int = 0) -> int:
    del spent
    return _part(sizes, prefix, rest, room=room)


QUEUE_POLICIES = (
    Mutant(
        name="longest-branch-first",
        origin="SGLang's schedule policies: dfs-weight by the length of a match is lpm",
        bug="the walk takes the longest match first, however few requests share it",
        signature="the longest match went first",
        test=f"{_SCHEDULING}/test_depth_first.py::test_the_heaviest_branch_goes_first",
        owner=DepthFirst,
        attribute="order",
        replacement=_longest_branch_first,
    ),
    Mutant(
        name="walk-without-a-bound",
        origin="atlas pull request 911, and SGLang's dfs-weight, which has no bound",
        bug="a request that shares nothing waits for as long as others that share something keep coming",
        signature="overtook it, the bound is",
        test=f"{_SCHEDULING}/test_depth_first.py::test_a_request_that_shares_nothing_is_not_passed_over_for_ever",
        owner=DepthFirst,
        attribute="order",
        replacement=_walk_without_a_bound,
    ),
    Mutant(
        name="microbatch-one-short-beside-a-chunk",
        origin="SGLang issues 30294 and 38118",
        bug="the rest of a split prompt counts twice against the bound, so a place beside it stays empty",
        signature="a place stays empty beside a chunk",
        test=f"{_SCHEDULING}/test_microbatch_bound.py::test_a_chunk_takes_one_place_and_no_more",
        owner=Planner,
        attribute="_may_start",
        replacement=_may_start_beside_no_chunk,
    ),
    Mutant(
        name="microbatch-bound-counts-all-that-run",
        origin="vLLM issue 27462",
        bug="the bound on one microbatch is compared with all requests that run, so most of the pipeline stays empty",
        signature="the bound counts all that run",
        test=f"{_SCHEDULING}/test_microbatch_bound.py::test_every_place_of_the_pipeline_has_as_many",
        owner=Planner,
        attribute="_may_start",
        replacement=_may_start_if_few_run,
    ),
    Mutant(
        name="microbatch-without-a-bound",
        origin="the other side of vLLM issue 27462",
        bug="the bound holds prompts back only, and a microbatch of decodes is larger",
        signature="are in one microbatch",
        test=f"{_SCHEDULING}/test_microbatch_bound.py::test_prompts_and_decodes_are_bounded",
        owner=Planner,
        attribute="_decode_share",
        replacement=_decode_share_of_all,
    ),
    Mutant(
        name="chunks-of-one-size",
        origin="SGLang pull request 15372",
        bug="the size of a part does not follow its prefix, so the later parts keep a stage the longest",
        signature="the size of a part does not follow its prefix",
        test=f"{_SCHEDULING}/test_even_chunks.py::test_parts_shrink_and_cost_the_same",
        owner=ChunkSizes,
        attribute="part",
        replacement=_part_without_a_prefix,
    ),
    Mutant(
        name="chunk-leaves-a-sliver",
        origin="SGLang pull request 23621",
        bug="what is left of a prompt after its last full part has a microbatch of its own, however little it is",
        signature="a sliver has a microbatch of its own",
        test=f"{_SCHEDULING}/test_even_chunks.py::test_a_rest_of_less_than_a_page_is_taken_along",
        owner=ChunkSizes,
        attribute="part",
        replacement=_part_with_a_sliver,
    ),
    Mutant(
        name="chunk-cost-of-one-prompt-alone",
        origin="vLLM issue 33914",
        bug="the size of a part is found for each prompt by itself, so a microbatch of two costs twice as much",
        signature="each prompt got a whole microbatch's share",
        test=f"{_SCHEDULING}/test_even_chunks.py::test_the_whole_microbatch_is_bounded",
        owner=ChunkSizes,
        attribute="part",
        replacement=_part_of_its_own,
    ),
)
