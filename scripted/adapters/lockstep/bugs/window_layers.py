"""Mutants of window layers: window pages that go too early or never."""

from __future__ import annotations

from collections.abc import Sequence

from engine.instruments import Pressure
from engine.memory import KVMemory, Lease, SlidingWindowPool
from engine.memory.sliding_window import NO_WINDOW_PAGE
from scripted.core.mutant import Mutant

__all__ = ["WINDOW_LAYERS"]

_TESTS = "tests/registered/pressure/test_window_layers.py"
_POOL_TESTS = "tests/registered/pressure/test_window_pool.py"
_TOO_EARLY_TOKENS = 32

_slide = KVMemory.slide
_publish = SlidingWindowPool.publish
_usable = vars(KVMemory)["_usable"]


def _slide_ahead(memory: KVMemory, lease: Lease, position: int) -> None:
    _slide(memory, lease, position + _TOO_EARLY_TOKENS)


def _never_slide(memory: KVMemory, lease: Lease, position: int) -> None:
    del memory, lease, position


def _keep_no_window_pages(pressure: Pressure, count: int, window: SlidingWindowPool) -> None:
    del pressure, count, window


def _forget_what_is_kept(pressure: Pressure) -> int:
    del pressure
    return 0


def _use_everything(window: SlidingWindowPool, pages: Sequence[int]) -> int:
    del window
    return len(pages)


def _never_replace(window: SlidingWindowPool, own: int, cached: int) -> None:
    if own == cached or window.beside[own] == NO_WINDOW_PAGE or window.beside[cached] != NO_WINDOW_PAGE:
        _publish(window, own, cached)
        return
    window.pages.release((window.beside[own],))
    window.beside[own] = NO_WINDOW_PAGE


def _use_it_alone(window: SlidingWindowPool, page: int) -> None:
    window.idle.pop(page, None)
    window.users[window.beside[page]] = 1


def _usable_but_two(memory: KVMemory, ids: Sequence[int], window: SlidingWindowPool, lora: int) -> Sequence[int]:
    usable: Sequence[int] = _usable(memory, ids[:-1], window, lora)
    return usable


def _drop_nothing(window: SlidingWindowPool, pages: Sequence[int]) -> None:
    del window, pages


def _evict_nothing(window: SlidingWindowPool, count: int) -> None:
    del window, count


WINDOW_LAYERS = (
    Mutant(
        name="window-pages-go-too-early",
        origin="B18: a window page that something in flight, or still to come, can see",
        bug="a window page is given back 32 tokens before it is out of the window",
        signature="a window page was another request's",
        test=f"{_TESTS}::test_window_pages_stay_while_they_are_seen",
        owner=KVMemory,
        attribute="slide",
        replacement=_slide_ahead,
    ),
    Mutant(
        name="window-pages-are-kept",
        origin="B18: a request that is longer than the window pool",
        bug="window pages stay with their request until it ends",
        signature="did not finish within",
        test=f"{_TESTS}::test_a_request_longer_than_the_window_pool_runs",
        owner=KVMemory,
        attribute="slide",
        replacement=_never_slide,
    ),
    Mutant(
        name="prefix-without-its-window-is-used",
        origin="B18: a cached prefix whose window pages were evicted",
        bug="a prefix is hit as far as its pages are cached, whatever is left of its window pages",
        signature="a prefix was used without its window",
        test=f"{_TESTS}::test_a_prefix_is_used_as_far_as_its_window_is_there",
        owner=SlidingWindowPool,
        attribute="usable_pages",
        replacement=_use_everything,
    ),
    Mutant(
        name="window-pages-are-not-kept-back",
        origin="the verb exhaust_window",
        bug="pressure on the window pool keeps nothing",
        signature="t.state.window.free == 1",
        test=f"{_TESTS}::test_window_pages_are_exhausted_and_released",
        owner=Pressure,
        attribute="_leave_window_pages",
        replacement=_keep_no_window_pages,
    ),
    Mutant(
        name="kept-window-pages-count-as-owned",
        origin="the verb exhaust_window",
        bug="window pages that the operator keeps back are taken for those of requests, so pressure cannot go back up",
        signature="exhaust_window(leave_pages) is at most",
        test=f"{_TESTS}::test_window_pages_go_up_and_down_to_what_is_asked",
        owner=Pressure,
        attribute="_kept_window_pages",
        replacement=property(_forget_what_is_kept),
    ),
    Mutant(
        name="lost-window-page-is-not-replaced",
        origin="SGLang pull request 27586: an insert that meets a node without its window pages frees the wrong ones",
        bug="who computes a prefix again whose window pages the tree lost frees its own instead of handing them over",
        signature="but no lease uses it",
        test=f"{_POOL_TESTS}::test_a_prefix_that_lost_window_pages_is_computed_again",
        owner=SlidingWindowPool,
        attribute="publish",
        replacement=_never_replace,
    ),
    Mutant(
        name="first-to-leave-gives-window-pages-back",
        origin="B18: a prefix whose window pages several requests see",
        bug="the first of several requests that leaves a cached prefix makes its window pages free for eviction",
        signature="but no lease uses it",
        test=f"{_POOL_TESTS}::test_a_shared_prefix_is_left_in_turn",
        owner=SlidingWindowPool,
        attribute="_use",
        replacement=_use_it_alone,
    ),
    Mutant(
        name="last-two-tokens-are-never-hit",
        origin="a mutant that no script had noticed",
        bug="with window layers a prompt that is one token longer than its pages does not hit its last page",
        signature="again.cached_tokens == hit",
        test=f"{_POOL_TESTS}::test_every_token_but_the_last_can_be_hit",
        owner=KVMemory,
        attribute="_usable",
        replacement=_usable_but_two,
    ),
    Mutant(
        name="evicted-pages-keep-their-window-pages",
        origin="SGLang issue 27789: the window pool leaks page by page",
        bug="a page that leaves the tree leaves its window page taken",
        signature="without a cached page no window page is cached",
        test=f"{_POOL_TESTS}::test_a_page_that_is_evicted_leaves_no_window_page",
        owner=SlidingWindowPool,
        attribute="drop",
        replacement=_drop_nothing,
    ),
    Mutant(
        name="window-pages-are-counted-but-not-evicted",
        origin="SGLang pull request 29662: what could be evicted from the window pool is counted as room, and stays",
        bug="a request has room because of window pages that no request uses, but these are not evicted for it",
        signature="ask first",
        test=f"{_POOL_TESTS}::test_a_prefix_that_lost_window_pages_is_computed_again",
        owner=SlidingWindowPool,
        attribute="evict",
        replacement=_evict_nothing,
    ),
)
