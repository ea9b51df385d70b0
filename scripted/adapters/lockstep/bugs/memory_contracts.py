"""Mutants of memory as users see it: prefix hits, and the pressure of an operator on pages and rows."""

from __future__ import annotations

import functools
from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["MEMORY_CONTRACTS"]

_CORE: Final = "tests/registered/core"
_of: Final = functools.partial(Mutant, origin="a contract of the core suite")


MEMORY_CONTRACTS: Final = (
    _of(
        name="own-tokens-count-as-hits",
        bug="what a request computed itself and finds again after a retraction is told as cached",
        signature="its own tokens were counted as hits",
        test=f"{_CORE}/test_memory_accounts.py::test_what_a_request_computed_itself_is_no_hit",
        target="engine.scheduler.planner:Planner._admit",
        cut="request.place = CHUNKED",
        becomes=(
            "request.cached_tokens = min(request.prefill_start, request.prompt_tokens)\n    request.place = CHUNKED"
        ),
    ),
    _of(
        name="prefixes-are-never-hit",
        bug="a cached prefix is computed again",
        signature="cached_tokens",
        test=f"{_CORE}/test_memory_accounts.py::test_a_warm_prefix_is_used",
        target="engine.memory.radix:RadixTree.match",
        cut="node, pages = self.root, []",
        becomes="node, pages, tokens = self.root, [], ()",
    ),
    _of(
        name="rows-are-not-kept-back",
        bug="pressure on rows keeps none",
        signature="were to be left by SetPressure",
        test=f"{_CORE}/test_pressure_verbs.py::test_rows_are_exhausted_and_released",
        target="engine.memory.rows:RowPool.reserve",
        cut="if count > self.free:",
        becomes="count = 0\n    if count > self.free:",
    ),
    _of(
        name="kept-rows-count-as-owned",
        bug="rows that the operator keeps back are taken for those of requests, so pressure cannot go back up",
        signature="exhaust_rows(leave_rows) is at most",
        test=f"{_CORE}/test_pressure_verbs.py::test_what_cannot_be_left_is_refused_with_the_most_that_can",
        target="engine.instruments.pressure:Pressure.most_free_rows",
        cut=" + self._rows.reserved",
    ),
    _of(
        name="pressure-evicts-everything",
        bug="pressure empties the cache before it looks whether it must",
        signature="== (10, 4)",
        test=f"{_CORE}/test_pressure_verbs.py::test_exhausting_evicts_only_what_it_must",
        target="engine.instruments.pressure:Pressure.apply",
        cut="if isinstance(event, EvictCache):",
        becomes="self._tree.evict(self._tree.evictable_pages)\n    if isinstance(event, EvictCache):",
    ),
    _of(
        name="thinning-forgets-leaves",
        bug="the heap of leaves to evict is emptied when it grows, with what is still to be evicted in it",
        signature="assert 1 == 3",
        test="tests/registered/pressure/test_eviction.py::test_a_prefix_that_is_used_often_hides_no_other",
        target="engine.memory.radix:RadixTree._offer_for_eviction",
        cut="if len(self._heap) > ",
        becomes="if len(self._heap) > 32:\n        self._heap.clear()\n    if len(self._heap) > ",
    ),
)
