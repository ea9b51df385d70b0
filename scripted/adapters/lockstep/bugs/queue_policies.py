"""Mutants of the walk through the prefix tree, of the bound on a microbatch's requests and of dynamic chunk sizes."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["QUEUE_POLICIES"]

_SCHEDULING: Final = "tests/registered/scheduling"


QUEUE_POLICIES: Final = (
    Mutant(
        name="longest-branch-first",
        origin="SGLang's schedule policies: dfs-weight by the length of a match is lpm",
        bug="the walk takes the longest match first, however few requests share it",
        signature="the longest match went first",
        test=f"{_SCHEDULING}/test_depth_first.py::test_the_heaviest_branch_goes_first",
        target="engine.scheduler.depth_first:depth_first",
        cut="[*[(-weight[node], first[node], 0) for node, _ in nodes], end]",
        becomes="[end]",
    ),
    Mutant(
        name="walk-without-a-bound",
        origin="atlas pull request 911, and SGLang's dfs-weight, which has no bound",
        bug="a request that shares nothing waits for as long as others that share something keep coming",
        signature="overtook it, the bound is",
        test=f"{_SCHEDULING}/test_depth_first.py::test_a_request_that_shares_nothing_is_not_passed_over_for_ever",
        target="engine.scheduler.policy:DepthFirst.order",
        cut="due = ",
        becomes="return depth_first(waiting, memory)\n    due = ",
    ),
    Mutant(
        name="microbatch-one-short-beside-a-chunk",
        origin="SGLang issues 30294 and 38118",
        bug="the rest of a split prompt counts twice against the bound, so a place beside it stays empty",
        signature="a place stays empty beside a chunk",
        test=f"{_SCHEDULING}/test_microbatch_bound.py::test_a_chunk_takes_one_place_and_no_more",
        target="engine.scheduler.planner:Planner._may_start",
        cut="len(plan.requests) >= plan.seats",
        becomes="len(plan.requests) + any(segment.start for segment in plan.segments) >= plan.seats",
    ),
    Mutant(
        name="microbatch-bound-counts-all-that-run",
        origin="vLLM issue 27462",
        bug="the bound on one microbatch is compared with all requests that run, so most of the pipeline stays empty",
        signature="the bound counts all that run",
        test=f"{_SCHEDULING}/test_microbatch_bound.py::test_every_place_of_the_pipeline_has_as_many",
        target="engine.scheduler.planner:Planner._may_start",
        cut="len(plan.requests) >= plan.seats",
        becomes="len(self._books.running) + len(plan.requests) >= self._most_requests",
    ),
    Mutant(
        name="microbatch-without-a-bound",
        origin="the other side of vLLM issue 27462",
        bug="the bound holds prompts back only, and a microbatch of decodes is larger",
        signature="are in one microbatch",
        test=f"{_SCHEDULING}/test_microbatch_bound.py::test_prompts_and_decodes_are_bounded",
        target="engine.scheduler.planner:Planner._decode_share",
        cut="min(self._most_requests, -(-len(self._books.running) // self._limits.pp_size))",
        becomes="-(-len(self._books.running) // self._limits.pp_size)",
    ),
    Mutant(
        name="chunks-of-one-size",
        origin="SGLang pull request 15372",
        bug="the size of a part does not follow its prefix, so the later parts keep a stage the longest",
        signature="the size of a part does not follow its prefix",
        test=f"{_SCHEDULING}/test_even_chunks.py::test_parts_shrink_and_cost_the_same",
        target="engine.scheduler.chunk_sizes:ChunkSizes.part",
        cut="page = self._page_size",
        becomes="prefix, page = 0, self._page_size",
    ),
    Mutant(
        name="chunk-leaves-a-sliver",
        origin="SGLang pull request 23621",
        bug="what is left of a prompt after its last full part has a microbatch of its own, however little it is",
        signature="a sliver has a microbatch of its own",
        test=f"{_SCHEDULING}/test_even_chunks.py::test_a_rest_of_less_than_a_page_is_taken_along",
        target="engine.scheduler.chunk_sizes:ChunkSizes.part",
        cut="rest if rest < tokens + page else tokens",
        becomes="rest, tokens",
    ),
    Mutant(
        name="chunk-cost-of-one-prompt-alone",
        origin="vLLM issue 33914",
        bug="the size of a part is found for each prompt by itself, so a microbatch of two costs twice as much",
        signature="each prompt got a whole microbatch's share",
        test=f"{_SCHEDULING}/test_even_chunks.py::test_the_whole_microbatch_is_bounded",
        target="engine.scheduler.chunk_sizes:ChunkSizes.part",
        cut="self.budget - spent",
        becomes="self.budget",
    ),
)
