"""Mutants of the memory: prefix tree, locks, rows, and what is published when."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.memory import KVMemory, Lease, Node, RadixTree
from engine.scheduler import Request
from engine.scheduler.planner import Plan, Planner
from scripted.core.mutant import GALLERY_TESTS, Mutant

__all__ = ["MEMORY"]

_admit = KVMemory.admit
_publish = KVMemory.publish
_release = KVMemory.release
_add_segment = Planner._add_segment


def _admit_nothing_to_compute(memory: KVMemory, rid: str, ids: Sequence[int], **details: int) -> Lease | None:
    if memory.tree.match_length(ids) == len(ids):
        memory.tree.lock(memory.tree.match(ids)[0])
        return None  # All of it is cached: there is nothing to compute, so there is no batch to be in.
    return _admit(memory, rid, ids, **details)


def _admit_and_keep_the_lock(memory: KVMemory, rid: str, ids: Sequence[int], **details: int) -> Lease | None:
    lease = _admit(memory, rid, ids, **details)
    if lease is None:
        memory.tree.lock(memory.tree.match(ids[:-1])[0])
    return lease


def _publish_what_is_planned(planner: Planner, plan: Plan, request: Request, *args: Any, **details: Any) -> None:
    _add_segment(planner, plan, request, *args, **details)
    assert request.lease is not None
    planner._memory.publish(request.lease, request.ids[: request.planned_tokens], counts=False)


def _publish_and_count_every_part(memory: KVMemory, lease: Lease, ids: Sequence[int], *, counts: bool) -> None:
    del counts
    _publish(memory, lease, ids, counts=True)


def _release_without_unlocking(memory: KVMemory, lease: Lease) -> None:
    memory.tree.lock(lease.node)
    _release(memory, lease)


def _evict_the_locked_as_well(tree: RadixTree) -> Node | None:
    leaves = [node for node in tree.nodes() if not node.children]
    return min(leaves, key=lambda node: node.last_used, default=None)


MEMORY = (
    Mutant(
        name="cached-prompt-never-runs",
        origin="G24: pypto serving",
        bug="a fully cached prompt has nothing to compute, so it is never scheduled while its lock refs climb",
        signature="did not finish within",
        test=f"{GALLERY_TESTS}/test_g24_fully_cached.py::test_a_fully_cached_prompt_runs",
        owner=KVMemory,
        attribute="admit",
        replacement=_admit_nothing_to_compute,
    ),
    Mutant(
        name="prefix-published-before-its-result",
        origin="G21: TGI pull request 2489",
        bug="a prompt's pages are in the prefix tree before the step that writes them has come back",
        signature="a prefix was hit that was never prefilled",
        test=f"{GALLERY_TESTS}/test_g21_unwritten_prefix.py::test_a_failed_step_leaves_no_prefix",
        owner=Planner,
        attribute="_add_segment",
        replacement=_publish_what_is_planned,
    ),
    Mutant(
        name="deferred-request-keeps-its-lock",
        origin="B04: pypto serving",
        bug="a request that does not fit yet keeps the lock on its prefix, one more each time it is tried",
        signature="a request that owns nothing holds a lock",
        test="tests/registered/pressure/test_deferred_request.py::test_a_deferred_request_owns_nothing",
        owner=KVMemory,
        attribute="admit",
        replacement=_admit_and_keep_the_lock,
    ),
    Mutant(
        name="parts-of-a-prompt-count-as-hits",
        origin="the exact hit counts of SGLang's scripted runtime",
        bug="each part of a split prompt counts as a hit of its prefix",
        signature="the prompt was counted",
        test="tests/registered/chunked/test_hit_counts.py::test_nodes_of_a_split_prompt_are_hit_twice",
        owner=KVMemory,
        attribute="publish",
        replacement=_publish_and_count_every_part,
    ),
    Mutant(
        name="lock-refs-are-not-released",
        origin="B11: everything that a request owns is given back once",
        bug="a request ends, but its lock on the prefix tree stays",
        signature="a lock outlived its request",
        test="tests/registered/core/test_memory_accounts.py::test_lock_refs_are_held_and_released",
        owner=KVMemory,
        attribute="release",
        replacement=_release_without_unlocking,
    ),
    Mutant(
        name="locked-prefix-is-evicted",
        origin="B11: a prefix that a live request protects",
        bug="eviction takes the least recently used leaf, even a protected one",
        signature="a protected prefix was evicted",
        test="tests/registered/pressure/test_eviction.py::test_a_protected_prefix_stays",
        owner=RadixTree,
        attribute="_least_recently_used",
        replacement=_evict_the_locked_as_well,
    ),
)
