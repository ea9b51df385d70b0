"""Mutants of window layers: window pages that go too early or never."""

from __future__ import annotations

from typing import Final

from scripted.core.mutant import Mutant

__all__ = ["WINDOW_LAYERS"]

_TESTS: Final = "tests/registered/pressure/test_window_layers.py"
_POOL_TESTS: Final = "tests/registered/pressure/test_window_pool.py"


WINDOW_LAYERS: Final = (
    Mutant(
        name="window-pages-go-too-early",
        origin="B18: a window page that something in flight, or still to come, can see",
        bug="a window page is given back 32 tokens before it is out of the window",
        signature="a window page was another request's",
        test=f"{_TESTS}::test_window_pages_stay_while_they_are_seen",
        target="engine.memory.kv:KVMemory.slide",
        cut="self.sliding_window.slide(lease, position)",
        becomes="self.sliding_window.slide(lease, position + 32)",
    ),
    Mutant(
        name="window-pages-are-kept",
        origin="B18: a request that is longer than the window pool",
        bug="window pages stay with their request until it ends",
        signature="did not finish within",
        test=f"{_TESTS}::test_a_request_longer_than_the_window_pool_runs",
        target="engine.memory.kv:KVMemory.slide",
        cut="if self.sliding_window is not None:",
        becomes="if False:",
    ),
    Mutant(
        name="prefix-without-its-window-is-used",
        origin="B18: a cached prefix whose window pages were evicted",
        bug="a prefix is hit as far as its pages are cached, whatever is left of its window pages",
        signature="a prefix was used without its window",
        test=f"{_TESTS}::test_a_prefix_is_used_as_far_as_its_window_is_there",
        target="engine.memory.sliding_window:SlidingWindowPool.usable_pages",
        cut="missing = count",
        becomes="pass",
    ),
    Mutant(
        name="window-pages-are-not-kept-back",
        origin="the verb exhaust_window",
        bug="pressure on the window pool keeps nothing",
        signature="were to be left by SetPressure",
        test=f"{_TESTS}::test_window_pages_are_exhausted_and_released",
        target="engine.instruments.pressure:Pressure._leave_window_pages",
        cut="pages = window.pages",
        becomes="return\n    pages = window.pages",
    ),
    Mutant(
        name="kept-window-pages-count-as-owned",
        origin="the verb exhaust_window",
        bug="window pages that the operator keeps back are taken for those of requests, so pressure cannot go back up",
        signature="the pressure is said to be False",
        test=f"{_TESTS}::test_window_pages_go_up_and_down_to_what_is_asked",
        target="engine.instruments.pressure:Pressure._kept_window_pages",
        cut="0 if self._window is None else self._window.pages.reserved",
        becomes="0",
    ),
    Mutant(
        name="lost-window-page-is-not-replaced",
        origin="SGLang pull request 27586: an insert that meets a node without its window pages frees the wrong ones",
        bug="who computes a prefix again whose window pages the tree lost frees its own instead of handing them over",
        signature="but no lease uses it",
        test=f"{_POOL_TESTS}::test_a_prefix_that_lost_window_pages_is_computed_again",
        target="engine.memory.sliding_window:SlidingWindowPool.publish",
        cut="self.beside[cached] = window_page",
        becomes="self.pages.release((window_page,))\n        return",
    ),
    Mutant(
        name="first-to-leave-gives-window-pages-back",
        origin="B18: a prefix whose window pages several requests see",
        bug="the first of several requests that leaves a cached prefix makes its window pages free for eviction",
        signature="but no lease uses it",
        test=f"{_POOL_TESTS}::test_a_shared_prefix_is_left_in_turn",
        target="engine.memory.sliding_window:SlidingWindowPool._use",
        cut="self.users[window_page] += 1",
        becomes="self.users[window_page] = 1",
    ),
    Mutant(
        name="last-two-tokens-are-never-hit",
        origin="a mutant that no script had noticed",
        bug="with window layers a prompt that is one token longer than its pages does not hit its last page",
        signature="again.cached_tokens == hit",
        test=f"{_POOL_TESTS}::test_every_token_but_the_last_can_be_hit",
        target="engine.memory.kv:KVMemory._usable",
        cut="self.tree.match_pages(ids, lora)",
        becomes="self.tree.match_pages(ids[:-1], lora)",
    ),
    Mutant(
        name="evicted-pages-keep-their-window-pages",
        origin="SGLang issue 27789: the window pool leaks page by page",
        bug="a page that leaves the tree leaves its window page taken",
        signature="without a cached page no window page is cached",
        test=f"{_POOL_TESTS}::test_a_page_that_is_evicted_leaves_no_window_page",
        target="engine.memory.sliding_window:SlidingWindowPool.drop",
        cut="for page in pages:",
        becomes="for page in ():",
    ),
    Mutant(
        name="window-pages-are-counted-but-not-evicted",
        origin="SGLang pull request 29662: what could be evicted from the window pool is counted as room, and stays",
        bug="a request has room because of window pages that no request uses, but these are not evicted for it",
        signature="ask first",
        test=f"{_POOL_TESTS}::test_a_prefix_that_lost_window_pages_is_computed_again",
        target="engine.memory.sliding_window:SlidingWindowPool.evict",
        cut="min(count, len(self.idle))",
        becomes="0",
    ),
)
