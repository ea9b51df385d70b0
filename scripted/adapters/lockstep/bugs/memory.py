"""Mutants of the memory: prefix tree, locks, rows, and what is published when."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["MEMORY"]


MEMORY: Final = (
    Mutant(
        name="cached-prompt-never-runs",
        origin="G24: pypto serving",
        bug="a fully cached prompt has nothing to compute, so it is never scheduled while its lock refs climb",
        signature="did not finish within",
        test=f"{GALLERY_TESTS}/test_g24_fully_cached.py::test_a_fully_cached_prompt_runs",
        target="engine.memory.kv:KVMemory.admit",
        cut="if not self.rows.free:",
        becomes=(
            "if self.tree.match_length(ids) == len(ids):\n"
            "        self.tree.lock(self.tree.match(ids)[0])\n"
            "        return None  # There is nothing to compute, so there is no batch to be in.\n"
            "    if not self.rows.free:"
        ),
    ),
    Mutant(
        name="prefix-published-before-its-result",
        origin="G21: TGI pull request 2489",
        bug="a prompt's pages are in the prefix tree before the step that writes them has come back",
        signature="a prefix was hit that was never prefilled",
        test=f"{GALLERY_TESTS}/test_g21_unwritten_prefix.py::test_a_failed_step_leaves_no_prefix",
        target="engine.scheduler.planner:Planner._add_segment",
        cut="plan.tokens += request.planned_tokens - start",
        becomes=(
            "plan.tokens += request.planned_tokens - start\n"
            "    self._memory.publish(lease, request.ids[: request.planned_tokens], counts=False)"
        ),
    ),
    Mutant(
        name="deferred-request-keeps-its-lock",
        origin="B04: pypto serving",
        bug="a request that does not fit yet keeps the lock on its prefix, one more each time it is tried",
        signature="a request that owns nothing holds a lock",
        test="tests/registered/pressure/test_deferred_request.py::test_a_deferred_request_owns_nothing",
        target="engine.memory.kv:KVMemory.admit",
        cut="self.tree.unlock(node)",
        becomes="pass",
    ),
    Mutant(
        name="parts-of-a-prompt-count-as-hits",
        origin="the exact hit counts of SGLang's scripted runtime",
        bug="each part of a split prompt counts as a hit of its prefix",
        signature="the prompt was counted",
        test="tests/registered/chunked/test_hit_counts.py::test_nodes_of_a_split_prompt_are_hit_twice",
        target="engine.memory.kv:KVMemory.publish",
        cut="counts=counts",
        becomes="counts=True",
    ),
    Mutant(
        name="lock-refs-are-not-released",
        origin="B11: everything that a request owns is given back once",
        bug="a request ends, but its lock on the prefix tree stays",
        signature="a lock outlived its request",
        test="tests/registered/core/test_memory_accounts.py::test_lock_refs_are_held_and_released",
        target="engine.memory.kv:KVMemory.release",
        cut="self.tree.unlock(lease.node)",
        becomes="pass",
    ),
    Mutant(
        name="locked-prefix-is-evicted",
        origin="B11: a prefix that a live request protects",
        bug="eviction takes the least recently used leaf, even a protected one",
        signature="a protected prefix was evicted",
        test="tests/registered/pressure/test_eviction.py::test_a_protected_prefix_stays",
        target="engine.memory.radix:RadixTree._least_recently_used",
        cut="while self._heap:",
        becomes=(
            "leaves = [node for node in self.nodes() if not node.children]\n"
            "    return min(leaves, key=lambda node: node.last_used, default=None)\n"
            "    while self._heap:"
        ),
    ),
)
