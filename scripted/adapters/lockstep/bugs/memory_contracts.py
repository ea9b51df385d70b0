"""Mutants of memory as users see it: prefix hits, and the pressure of an operator on pages and rows."""

# ruff: noqa: SLF001 - a mutant reaches into what it breaks.

from __future__ import annotations

from typing import Any

from engine.instruments import Pressure
from engine.memory.node import Node
from engine.memory.radix import RadixTree
from engine.memory.rows import RowPool
from engine.messages import EvictCache, OperatorEvent
from engine.scheduler import Request
from engine.scheduler.planner import Planner
from scripted.adapters.lockstep.bugs.contract import contract

__all__ = ["MEMORY_CONTRACTS"]

_SMALL_HEAP = 32

_admit = Planner._admit
_apply = Pressure.apply
_offer_for_eviction = RadixTree._offer_for_eviction


def _admit_and_tell_every_hit(this: Planner, request: Request) -> bool:
    admitted = _admit(this, request)
    if admitted:
        request.cached_tokens = min(request.prefill_start, request.prompt_tokens)
    return admitted


def _no_prefix(tree: RadixTree, *looked_up: object) -> tuple[Any, list[int]]:
    del looked_up
    return tree.root, []


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


MEMORY_CONTRACTS = (
    contract(
        "own-tokens-count-as-hits",
        "what a request computed itself and finds again after a retraction is told as cached",
        "its own tokens were counted as hits",
        "test_memory_accounts.py::test_what_a_request_computed_itself_is_no_hit",
        Planner,
        "_admit",
        _admit_and_tell_every_hit,
    ),
    contract(
        "prefixes-are-never-hit",
        "a cached prefix is computed again",
        "cached_tokens",
        "test_memory_accounts.py::test_a_warm_prefix_is_used",
        RadixTree,
        "match",
        _no_prefix,
    ),
    contract(
        "rows-are-not-kept-back",
        "pressure on rows keeps none",
        "t.state.rows.free == 1",
        "test_pressure_verbs.py::test_rows_are_exhausted_and_released",
        RowPool,
        "reserve",
        _keep_no_rows,
    ),
    contract(
        "kept-rows-count-as-owned",
        "rows that the operator keeps back are taken for those of requests, so pressure cannot go back up",
        "exhaust_rows(leave_rows) is at most",
        "test_pressure_verbs.py::test_what_cannot_be_left_is_refused_with_the_most_that_can",
        Pressure,
        "most_free_rows",
        property(_free_rows),
    ),
    contract(
        "pressure-evicts-everything",
        "pressure empties the cache before it looks whether it must",
        "== (10, 4)",
        "test_pressure_verbs.py::test_exhausting_evicts_only_what_it_must",
        Pressure,
        "apply",
        _evict_before,
    ),
    contract(
        "thinning-forgets-leaves",
        "the heap of leaves to evict is emptied when it grows, with what is still to be evicted in it",
        "assert 1 == 3",
        "tests/registered/pressure/test_eviction.py::test_a_prefix_that_is_used_often_hides_no_other",
        RadixTree,
        "_offer_for_eviction",
        _thin_to_nothing,
    ),
)
