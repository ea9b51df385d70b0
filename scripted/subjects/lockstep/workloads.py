"""The library of base workloads: small, each with one situation that real engines got wrong.

More workloads find more than more depth: a search that sweeps one event over all of these beats two events over one.
Each is one line of a schedule's own text; write another one in the same way.
"""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

__all__ = ["FLAGSHIP", "STOP_TOKENS", "TEXTS"]

FLAGSHIP: Final = "chunked-alone"
# What the prompt of 40 tokens and seed 0 says, token by token.
STOP_TOKENS: Final = (56, 84, 120, 91)

_PP4: Final = "pp_size=4 pp_async_depth=2 chunked_prefill_size=64 max_total_tokens=1024"
_PP1: Final = "chunked_prefill_size=32 max_total_tokens=512"

_SMALL: Final = "page_size=4 chunked_prefill_size=16 max_total_tokens=48"

# A window of 64 tokens in pages of 16: one request uses 6 window pages at most, or 7 with chunks of 32 tokens.
_WINDOWED: Final = "model=embedded-window page_size=16 chunked_prefill_size=16"


def _boundaries() -> Iterator[tuple[str, str]]:
    """Every number that a limit is compared with, and its two neighbours: pages, rows, budget, queue, deadline."""
    for beside in (-1, 0, 1):
        name = {-1: "below", 0: "at", 1: "above"}[beside]
        yield (
            f"{name}-all-pages",
            f"page_size=4 max_total_tokens=16; 1 start a prompt={16 + beside} new=1; 9 start b prompt={16 + beside} new=1",
        )
        yield (
            f"{name}-all-pages-prefilled",
            f"page_size=4 max_total_tokens=16; 1 start a prompt={16 + beside} new=0; 9 start b prompt={16 + beside} new=0 logprobs_from=0",
        )
        yield (
            f"{name}-the-context-prefilled",
            f"context_length=16 max_total_tokens=64; 1 start a prompt={16 + beside} new=0; 9 start b prompt={16 + beside} new=1",
        )
        yield (
            f"{name}-a-page",
            f"page_size=4 chunked_prefill_size=16 max_total_tokens=16; 1 start a prompt={8 + beside} new=4; 2 start b prompt=4 seed=1 new=2",
        )
        yield (
            f"{name}-the-budget",
            f"{_SMALL}; 1 start a prompt={16 + beside} new=2; 1 start b prompt={12 + beside} seed=1 new=2; 2 start c prompt=4 seed=2 new=2",
        )
        yield (
            f"{name}-the-rows",
            f"{_SMALL} max_running_requests=2; "
            + "; ".join(f"1 start r{i} prompt=3 seed={i} new=2" for i in range(2 + beside)),
        )
        yield (
            f"{name}-the-queue",
            (
                f"{_SMALL} max_running_requests=1 max_queued_requests=2; 1 start a prompt=5 new=6; "
                + "; ".join(f"3 start q{i} prompt=5 seed={i + 1} new=1" for i in range(2 + beside))
                + "; 4 abort q0; 5 start z prompt=5 seed=9 new=1"
            ),
        )
        yield (
            f"{name}-the-tries",
            (
                "page_size=4 max_total_tokens=40 chunked_prefill_size=32; 1 start a prompt=28 new=5; "
                + "; ".join(f"2 start big{i} prompt=13 seed={i + 1} new=1" for i in range(16 + beside))
                + "; 2 start fits prompt=2 seed=60 new=1; 5 abort-all"
            ),
        )
        yield (
            f"{name}-the-deadline",
            f"{_SMALL}; 1 start a prompt=9 new=3; 2 hold; 3 flush timeout_s=1.0; 5 advance seconds={1 + beside / 4}; 8 release",
        )
        # One that is more urgent, in a window pool that the other one has to leave first.
        yield (
            f"{name}-the-window-pool",
            (
                f"{_WINDOWED} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens={176 + 16 * beside}; "
                "1 start a prompt=70 new=5; 7 start b prompt=75 seed=1 new=3 priority=1; 14 start c prompt=75 seed=1 new=2"
            ),
        )
        # One that hits more than a window, beside one that runs.
        yield (
            f"{name}-the-window-pool-after-a-hit",
            (
                f"{_WINDOWED} max_total_tokens=512 max_window_tokens={192 + 16 * beside}; 1 start a prompt=110 new=1; "
                "9 start b prompt=70 seed=1 new=9; 15 start c prompt=130 new=2"
            ),
        )
        yield (
            f"{name}-a-window",
            f"{_WINDOWED} pp_async_depth=1 max_total_tokens=256 max_window_tokens=112; 1 start a prompt={80 + beside} new=3; 11 start b prompt={80 + beside} new=2",
        )
        yield (
            f"{name}-the-time-limit",
            f"{_SMALL} pp_size=2; 1 start a prompt=29 new=8 timeout_s=1.0; 2 start b prompt=5 seed=1 new=2; 8 advance seconds={1 + beside / 4}",
        )
        yield (
            f"{name}-the-waiting-limit",
            (
                f"{_SMALL} max_running_requests=1; 1 start a prompt=5 new=6; 2 start b prompt=9 seed=1 new=2 waiting_timeout_s=1.0; "
                f"4 advance seconds={1 + beside / 4}"
            ),
        )


def _long_queues() -> Iterator[tuple[str, str]]:
    """As many requests wait as are ordered by their prefix, and one more."""
    for name, count in (("at", 128), ("above", 129)):
        yield (
            f"{name}-the-ordered-queue",
            (
                "schedule_policy=lpm max_running_requests=1 page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start warm prompt=9 new=1; "
                + "; ".join(f"3 start r{i} prompt=2 seed={i + 1} new=1" for i in range(count - 1))
                + "; 3 start cached prompt=9 new=1; 4 abort-all"
            ),
        )


TEXTS: Final[dict[str, str]] = {
    # The flagship: between the last chunk and its result every queue is empty.
    FLAGSHIP: f"{_PP4}; 1 start a prompt=125 new=2",
    "one-stage": f"{_PP1}; 1 start a prompt=70 new=3",
    "names-with-a-common-prefix": f"{_PP1} pp_size=2; 1 start r-1 prompt=20 new=4; 1 start r-10 prompt=20 seed=1 new=4",
    "deferred-flush": f"{_PP4}; 1 start a prompt=125 new=2; 3 flush timeout_s=5.0",
    "one-stage-deep": f"{_PP1} pp_async_depth=2; 1 start a prompt=70 new=3; 2 start b prompt=40 seed=1 new=3",
    "warm-prefix": f"{_PP4}; 1 start warm prompt=96 new=1; 16 start a prompt=125 new=2",
    # Equal prompts of full pages: a fully cached prompt must still compute one token.
    "twins": f"{_PP1}; 1 start a prompt=48 new=2; 8 start b prompt=48 new=2; 9 start c prompt=48 new=3",
    "chunked-beside-decodes": (
        "pp_size=2 chunked_prefill_size=32 max_total_tokens=512; 1 start a prompt=10 new=8; 1 start b prompt=9 seed=1 new=8; "
        "5 start c prompt=100 seed=2 new=2"
    ),
    "mixed-chunk": (
        "pp_size=2 pp_async_depth=1 mixed_chunk=True chunked_prefill_size=32 max_total_tokens=512; "
        "1 start a prompt=10 new=8; 1 start b prompt=9 seed=1 new=8; 5 start c prompt=75 seed=2 new=3"
    ),
    # Chunks that end in the middle of a page.
    "ragged-chunks": "pp_size=2 chunked_prefill_size=24 max_total_tokens=256; 1 start a prompt=61 new=2; 2 start b prompt=40 new=2",
    "single-token-pages": (
        "pp_size=2 page_size=1 chunked_prefill_size=5 max_total_tokens=40; 1 start a prompt=12 new=3; 3 start b prompt=9 new=3"
    ),
    # Decodes run out of pages: some go back to the queue.
    "full-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44; 1 start a prompt=13 new=10; "
        "1 start b prompt=12 seed=1 new=10; 3 start c prompt=9 seed=2 new=6"
    ),
    "full-rows": (
        "pp_size=2 max_running_requests=2 chunked_prefill_size=32 max_total_tokens=512; 1 start a prompt=20 new=4; "
        "1 start b prompt=20 seed=1 new=4; 1 start c prompt=40 seed=2 new=3; 2 start d prompt=20 new=3"
    ),
    # One place only, and a prompt of several chunks in it.
    "one-row": (
        "pp_size=2 max_running_requests=1 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=45 new=2; "
        "2 start b prompt=20 seed=1 new=2"
    ),
    "priorities": (
        "schedule_policy=priority priority_preemption=True max_running_requests=2 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=48; 1 start a prompt=13 new=8; 1 start b prompt=12 seed=1 new=8; "
        "5 start c prompt=14 seed=2 new=3 priority=2; 6 start d prompt=6 seed=3 new=2 priority=1"
    ),
    "priorities-in-line": (
        "schedule_policy=priority max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=3; "
        "2 start b prompt=20 seed=1 priority=1; 2 start c prompt=20 seed=2 priority=5"
    ),
    "prefix-in-line": (
        "schedule_policy=lpm max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=40 new=3; "
        "2 start b prompt=40 seed=1; 2 start c prompt=60"
    ),
    # The second token of this prompt, at which it stops.
    "stops": f"{_PP4}; 1 start a prompt=125 new=5 stop=92",
    "longest-prefix": (
        "schedule_policy=lpm max_running_requests=2 chunked_prefill_size=32 max_total_tokens=512; 1 start a prompt=40 new=3; "
        "2 start b prompt=40 seed=1 new=2; 2 start c prompt=60 new=2"
    ),
    "no-cache": f"{_PP1} radix_cache=False pp_size=2; 1 start a prompt=40 new=3; 2 start b prompt=40 new=3",
    "no-chunks": "pp_size=2 chunked_prefill_size=-1 max_total_tokens=256; 1 start a prompt=70 new=3; 2 start b prompt=33 new=3",
    # Room for one page less than all requests need: eviction of what none of them holds.
    "eviction": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=40; 1 start a prompt=17 new=2; 9 start b prompt=20 seed=1 new=3; "
        "16 start c prompt=17 new=3"
    ),
    "at-the-context-limit": (
        "context_length=40 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=35 new=30; 1 start b prompt=12 seed=1 new=2"
    ),
    "short-queue": (
        "max_queued_requests=2 max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=3; "
        "2 start b prompt=20 seed=1; 2 start c prompt=20 seed=2; 3 start d prompt=20 seed=3"
    ),
    "oversize": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=50 new=2; 1 start b prompt=20 seed=1 new=2; "
        "2 start c prompt=30 seed=2 new=20; 3 start d prompt=6 seed=3 new=2"
    ),
    # A big one waits for pages while small ones pass it.
    "passed-over": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=18 new=8; 2 start big prompt=33 seed=1 new=2; "
        "2 start c prompt=5 seed=2 new=2; 3 start d prompt=5 seed=3 new=2"
    ),
    "same-rid-again": f"{_PP1} pp_size=2; 1 start a prompt=40 new=3; 4 abort a; 4 start a prompt=50 seed=1 new=2",
    "deferred-flush-gives-up": f"{_PP4}; 1 start a prompt=125 new=2; 2 hold; 3 flush timeout_s=1.0; 5 advance seconds=2.0; 8 release",
    "paused-with-a-queue": (
        "pp_size=2 max_running_requests=2 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=5; "
        "1 start b prompt=20 seed=1 new=5; 1 start c prompt=20 seed=2 new=2; 6 pause mode=retract; 12 flush; 14 continue"
    ),
    "paused-mid-prompt": (
        "pp_size=2 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=60 new=2; 3 pause mode=retract; 7 continue"
    ),
    "paused-in-place": f"{_PP1} pp_size=2; 1 start a prompt=20 new=6; 5 pause mode=in_place; 12 continue",
    # What a failed microbatch wrote must not become a shared prefix.
    "failed-chunk": f"{_PP1} pp_size=2; 1 start a prompt=70 new=2; 2 fail; 8 start b prompt=70 new=2",
    "weight-update": f"{_PP4}; 1 start a prompt=70 new=2; 22 update; 30 start b prompt=70 new=2",
    "failed-update": f"{_PP1} pp_size=2; 1 start a prompt=70 new=2; 5 update timeout_s=1.0; 6 fail; 20 start b prompt=70 new=2",
    # Window layers: prompts of several windows, a prefix hit after one, and a pool smaller than what all need.
    "windowed": (
        "model=embedded-window pp_size=2 chunked_prefill_size=32 max_total_tokens=1024; 1 start a prompt=150 new=8; "
        "9 start b prompt=150 new=3; 12 start c prompt=170 seed=2 new=3"
    ),
    "windowed-tight": (
        "model=embedded-window pp_size=2 pp_async_depth=1 page_size=4 chunked_prefill_size=64 max_prefill_tokens=64 "
        "max_total_tokens=512 max_window_tokens=360; 1 start a prompt=150 new=6; 3 start b prompt=150 seed=1 new=6; "
        "20 start c prompt=150 new=3"
    ),
    # Guesses that are verified several at once: alone, beside others, in little memory, over window layers.
    "drafts": (
        "speculative_algorithm=ngram page_size=4 chunked_prefill_size=16 max_total_tokens=160; 1 start a prompt=20 new=20; "
        "3 start b prompt=9 seed=1 new=14; 20 start c prompt=20 new=9"
    ),
    "drafts-deep": (
        "pp_size=4 pp_async_depth=1 speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=200; 1 start a prompt=13 new=16; 2 start b prompt=12 seed=1 new=12; 3 start c prompt=30 seed=2 new=8"
    ),
    "drafts-tight": (
        "pp_size=2 speculative_algorithm=ngram speculative_ngram_min=1 speculative_num_draft_tokens=6 page_size=4 "
        "chunked_prefill_size=16 max_total_tokens=48; 1 start a prompt=13 new=14; 1 start b prompt=12 seed=1 new=14"
    ),
    "drafts-stop": (
        "speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=32 max_total_tokens=128; "
        "1 start a prompt=20 new=20 stop=35; 2 start b prompt=20 seed=3 new=20 stop=34"
    ),
    # Guesses that fail often enough for their requests to rest.
    "drafts-resting": (
        "speculative_algorithm=ngram speculative_ngram_min=1 speculative_ngram_max=1 speculative_num_draft_tokens=1 page_size=16 "
        "chunked_prefill_size=64 max_total_tokens=320; 1 start a prompt=20 new=30; 2 start b prompt=20 seed=1 new=30"
    ),
    # Guesses of a draft model, among them tokens at which a request stops.
    "drafts-of-a-model": (
        "speculative_algorithm=draft_model speculative_draft_model=embedded page_size=4 chunked_prefill_size=64 "
        "max_total_tokens=200; 1 start a prompt=40 new=8 stop=120; 2 start b prompt=40 new=14; 12 start c prompt=40 new=8 stop=91; "
        "13 start d prompt=44 seed=1 new=20"
    ),
    "drafts-windowed": (
        "model=embedded-window speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=64 "
        "max_prefill_tokens=64 max_total_tokens=512 max_window_tokens=280; 1 start a prompt=100 new=16; 9 start b prompt=90 seed=1 new=12"
    ),
    # Of a prefix that another one pushed out of the window pool only the beginning is hit, until it is computed again.
    "windowed-lost": (
        "model=embedded-window page_size=16 chunked_prefill_size=32 max_total_tokens=640 max_window_tokens=128; 1 start a prompt=100 new=2; "
        "8 start b prompt=80 seed=1 new=2; 14 start c prompt=100 new=2; 20 start d prompt=120 new=3"
    ),
    # Several requests see the same window pages, and leave them one after another.
    "windowed-shared": (
        "model=embedded-window pp_async_depth=1 page_size=16 chunked_prefill_size=32 max_total_tokens=640 max_window_tokens=240; "
        "1 start a prompt=100 new=2; 8 start b prompt=110 new=8; 9 start c prompt=110 shared=100 tail=1 new=3; 10 start d prompt=90 new=2; "
        "11 start e prompt=110 shared=70 tail=2 new=2; 24 start f prompt=110 new=2"
    ),
    # Window pages of requests that share a prefix, and are less urgent than one that has no room beside them.
    "windowed-priorities": (
        f"{_WINDOWED} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens=128; 1 start a prompt=70 new=5; "
        "7 start b prompt=75 seed=1 new=3 priority=1; 13 start c prompt=40 seed=1 new=9; 16 start d prompt=75 seed=2 new=2 priority=2"
    ),
    "windowed-priorities-shared": (
        f"{_WINDOWED} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens=160; 1 start w prompt=60 new=1; "
        "6 start a prompt=60 new=7; 6 start b prompt=60 new=7; 10 start c prompt=100 seed=1 new=2 priority=1"
    ),
    "windowed-priorities-exactly": (
        f"{_WINDOWED} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens=112; 1 start w prompt=40 new=1; "
        "6 start a prompt=40 new=9; 6 start b prompt=40 new=9; 12 start c prompt=60 seed=1 new=2 priority=1"
    ),
    # Both pools are too small: what leaves the tree leaves the window pool.
    "windowed-eviction": (
        f"{_WINDOWED} max_total_tokens=160 max_window_tokens=128; 1 start a prompt=70 new=2; 8 start b prompt=75 seed=1 new=2; "
        "16 start c prompt=70 new=12; 17 start d prompt=40 seed=2 new=8; 19 start e prompt=35 seed=3 new=2; 40 evict pages=1; 41 evict pages=3"
    ),
    "windowed-longest-prefix": (
        f"{_WINDOWED} schedule_policy=lpm max_running_requests=1 max_total_tokens=640 max_window_tokens=112; 1 start a prompt=70 new=2; "
        "2 start b prompt=75 seed=1 new=2; 3 start c prompt=70 new=2; 3 start d prompt=40 seed=1 new=2; 3 start e prompt=90 new=2"
    ),
    "windowed-no-cache": f"{_WINDOWED} radix_cache=False pp_size=2 max_total_tokens=256; 1 start a prompt=70 new=3; 2 start b prompt=70 new=3",
    "windowed-mixed": (
        "model=embedded-window pp_size=2 pp_async_depth=1 mixed_chunk=True page_size=4 chunked_prefill_size=16 max_total_tokens=512 "
        "max_window_tokens=200; 1 start a prompt=20 new=12; 2 start b prompt=66 seed=1 new=8; 6 start c prompt=90 seed=2 new=2"
    ),
    "windowed-pressed": (
        f"{_WINDOWED} max_total_tokens=512 max_window_tokens=192; 1 start a prompt=70 new=4; 3 pressure window=3; 6 start b prompt=70 new=3; "
        "8 pressure window=5; 9 pressure window=1; 11 relieve; 16 pressure window=8; 17 start c prompt=75 seed=1 new=2; 22 pressure window=99; "
        "24 pressure window=9; 25 start d prompt=70 new=2; 30 relieve"
    ),
    # An operator presses on pages, rows and locks while requests come and go, and evicts.
    "pressed": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start a prompt=13 new=6; 4 pressure pages=2; "
        "5 start b prompt=13 new=3; 7 pressure rows=0; 8 start c prompt=9 seed=1 new=2; 12 relieve; 20 pressure unlocked=0; "
        "21 start d prompt=9 seed=2 new=2; 24 relieve; 26 evict; 27 start e prompt=13 new=2"
    ),
    # To leave some, or more than there are.
    "pressed-to-a-number": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start a prompt=13 new=2; 2 start b prompt=13 shared=6 tail=1 new=2; "
        "3 start c prompt=9 seed=2 new=6; 5 pressure unlocked=1; 6 pressure pages=3; 7 pressure unlocked=2; 8 pressure pages=99; "
        "9 pressure rows=3; 10 pressure unlocked=99; 11 pressure rows=9999; 12 start d prompt=13 new=2; 14 pressure pages=5; 15 evict pages=1; "
        "16 evict pages=2; 17 relieve; 18 pressure unlocked=1; 19 evict; 20 start e prompt=13 new=2"
    ),
    # Pages are given back that lie below those that were taken since.
    "relieved-below": (
        "radix_cache=False page_size=4 chunked_prefill_size=64 max_total_tokens=64; 1 start a prompt=31 new=2; 1 start b prompt=28 seed=1 new=5; "
        "4 pressure pages=4; 4 start c prompt=9 seed=2 new=9; 7 start d prompt=20 seed=3 new=6; 8 relieve; 8 start e prompt=21 seed=4 new=2"
    ),
    # A microbatch fails after one of its requests was aborted.
    "failed-and-aborted": f"{_PP1} pp_size=2; 1 start a prompt=70 new=2; 1 start b prompt=9 seed=1 new=4; 2 fail; 3 abort a; 8 start c prompt=70 new=2",
    # Leaves are locked and left far more often than there are leaves; after that the one that was used longest ago still goes first.
    "left-often": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start a prompt=9 new=1; 3 start b prompt=9 seed=1 new=1; "
        "5 start c prompt=9 seed=2 new=1; 7 start d prompt=9 new=1; " + "9 pressure unlocked=0; 9 relieve; " * 40
        + "10 evict pages=1; 11 start e prompt=9 seed=1 new=1; 13 evict pages=2; 14 start f prompt=9 seed=2 new=1"
    ),
    "late-results": f"{_PP4}; 1 start a prompt=100 new=3; 2 hold; 3 start b prompt=100 new=2; 12 release count=1; 14 release",
    "full-pages-deep": (
        "pp_size=4 pp_async_depth=2 page_size=4 chunked_prefill_size=16 max_total_tokens=48; 1 start a prompt=13 new=8; "
        "1 start b prompt=12 seed=1 new=8; 1 start c prompt=9 seed=2 new=8; 6 start d prompt=11 seed=3 new=4"
    ),
    "priorities-deep": (
        "pp_size=4 pp_async_depth=1 schedule_policy=priority priority_preemption=True page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=56; 1 start a prompt=13 new=8; 2 start b prompt=12 seed=1 new=8; "
        "9 start c prompt=22 seed=2 new=4 priority=2"
    ),
    # Small ones keep coming past a big one that waits for pages: for a while, not for ever.
    "passed-over-often": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=8 pp_async_depth=1; 1 start a prompt=5 new=27; 2 start big prompt=33 seed=1 new=2; "
        + "; ".join(f"{3 + i} start s{i} prompt=2 seed={i + 2} new=1" for i in range(20))
    ),
    # Prompts that are cached keep coming past one that is not: for a while, not for ever.
    "overtaken-often": (
        "schedule_policy=lpm max_running_requests=1 chunked_prefill_size=64 max_total_tokens=512; 1 start warm prompt=40 new=1; "
        "2 start z prompt=20 seed=1 new=1; " + "; ".join(f"2 start s{i} prompt=40 new=1" for i in range(20))
    ),
    # Prompts that leave room for a few of the decodes: these take turns.
    "mixed-turns": (
        "mixed_chunk=True chunked_prefill_size=16 max_total_tokens=512; "
        + "; ".join(f"1 start r{i} prompt=3 seed={i} new=6" for i in range(4)) + "; "
        + "; ".join(f"{4 + i} start p{i} prompt=15 seed={i + 9} new=1" for i in range(4))
    ),
    # Prompts that leave one another in the middle of what is cached, again and again.
    "branches": (
        "page_size=4 chunked_prefill_size=32 max_total_tokens=128; 1 start a prompt=25 new=1; 3 start b prompt=25 shared=13 tail=1 new=1; "
        "5 start c prompt=25 shared=6 tail=2 new=1; 7 start d prompt=25 shared=21 tail=3 new=2; 9 start e prompt=25 new=2"
    ),
    # What comes after a page that differs is the same again.
    "rejoining": (
        "page_size=4 chunked_prefill_size=32 max_total_tokens=128; 1 start a prompt=20 shared=8 tail=5 new=1; "
        "3 start b prompt=20 shared=8 tail=6 new=1; 5 start c prompt=20 shared=4 tail=5 new=2; 8 start d prompt=24 shared=12 tail=5 new=2"
    ),
    # More are ready to decode than the share of a stage, beside a prompt that leaves room for them.
    "mixed-shares": (
        "pp_size=2 mixed_chunk=True page_size=4 chunked_prefill_size=32 max_total_tokens=256; "
        + "; ".join(f"1 start r{i} prompt=5 seed={i} new=5" for i in range(5)) + "; 3 start p prompt=9 seed=9 new=2; 4 start q prompt=70 seed=10 new=2"
    ),
    # Profiles take a place in the pipeline beside requests; one at a time.
    "profiled": (
        f"{_PP1} pp_size=2; 1 start a prompt=40 new=4; 2 profile; 3 profile; 5 profile-end; 6 profile-end; 7 start b prompt=20 seed=1 new=2; "
        "8 profile; 9 pause mode=in_place; 11 profile-end; 13 continue; 20 profile"
    ),
    # Time runs out: for what waits, for what is being computed, for what was sent back and is not bound to start again.
    "time-limits": (
        f"{_PP1} pp_size=2 max_running_requests=2; 1 start a prompt=70 new=6 timeout_s=2.0; 2 start b prompt=40 seed=1 new=6; "
        "3 start c prompt=20 seed=2 new=2 timeout_s=4.0 waiting_timeout_s=1.0; 4 start d prompt=9 seed=3 new=2 waiting_timeout_s=2.0; "
        "6 advance seconds=1.0; 9 advance seconds=1.0"
    ),
    "time-limit-while-paused": (
        f"{_PP1} pp_size=2; 1 start a prompt=40 new=6 timeout_s=2.0; 4 pause mode=in_place; 5 start b prompt=9 seed=1 new=2 waiting_timeout_s=1.0; "
        "6 advance seconds=2.0; 9 continue"
    ),
    "time-limit-while-sent-back": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44 waiting_timeout_s=1.0; 1 start a prompt=13 new=10; "
        "1 start b prompt=12 seed=1 new=10 timeout_s=2.0; 3 start c prompt=9 seed=2 new=6; 12 advance seconds=1.0; 14 advance seconds=1.0"
    ),
    # A tree of two branches: the shorter one is shared by more of those that wait, and one shares nothing.
    "walked": (
        "schedule_policy=dfs-weight max_running_requests=1 page_size=4 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=25 new=1; "
        "3 start b prompt=25 shared=9 tail=1 new=1; 5 start run prompt=5 seed=9 new=3; 6 start lonely prompt=9 seed=8 new=1; "
        "6 start d prompt=26 new=1; 6 start e prompt=14 shared=13 tail=1 new=1; 6 start f prompt=27 shared=9 tail=1 new=1; "
        "6 start g prompt=28 shared=9 tail=1 new=1; 7 start h prompt=17 new=1"
    ),
    # Those that share something keep coming past one that does not: for a while, not for ever.
    "walked-past-often": (
        "schedule_policy=dfs-weight max_running_requests=1 chunked_prefill_size=64 max_total_tokens=512; 1 start warm prompt=40 new=1; "
        "2 start z prompt=20 seed=1 new=1; " + "; ".join(f"2 start s{i} prompt=40 new=1" for i in range(20))
    ),
    # A bound on the requests of a microbatch: of prompts, beside a chunk, of decodes, of both.
    "small-microbatches": (
        f"{_PP1} pp_size=2 pp_max_micro_batch_size=2; 1 start a prompt=40 new=2; " + "; ".join(f"1 start r{i} prompt=3 seed={i + 1} new=4" for i in range(6))
    ),
    "small-mixed-microbatches": (
        f"{_PP1} pp_size=2 pp_async_depth=1 mixed_chunk=True pp_max_micro_batch_size=2; "
        + "; ".join(f"{1 + i} start r{i} prompt={5 + 30 * (i % 2)} seed={i} new=4" for i in range(5))
    ),
    # Parts of a prompt that get smaller as its prefix grows, alone and beside another, after a hit, in a microbatch with decodes.
    "even-chunks": (
        "pp_size=2 chunked_prefill_size=64 dynamic_chunking=True chunk_parity_tokens=32 max_total_tokens=1024; 1 start a prompt=200 new=2; "
        "1 start b prompt=64 seed=1 new=1; 14 start c prompt=230 shared=150 tail=2 new=2"
    ),
    "even-mixed-chunks": (
        "pp_size=2 pp_async_depth=1 mixed_chunk=True page_size=4 chunked_prefill_size=32 dynamic_chunking=True chunk_parity_tokens=16 max_total_tokens=512; "
        "1 start a prompt=7 new=8; 2 start b prompt=101 seed=1 new=2; 6 start c prompt=50 seed=2 new=2"
    ),
    # A draw depends on the seed, the position and the output so far, also after a retraction.
    "sampled": (
        f"{_SMALL}; 1 start a prompt=13 new=10 temperature=0.8 draw=7 penalty=0.5; "
        "1 start b prompt=12 seed=1 new=10 temperature=1.0 draw=8 penalty=1.5; 3 start c prompt=9 seed=2 new=6 temperature=0.5 penalty=0.5"
    ),
    "sampled-otherwise": (
        f"{_SMALL}; 1 start a prompt=13 new=10 temperature=0.8 draw=7 presence=0.5 min_p=0.25; "
        "1 start b prompt=12 seed=1 new=10 repetition=1.5 temperature=1.0; 3 start c prompt=9 seed=2 new=6 biased=65 bias=-100.0"
    ),
    # Ended by the token that ends a text: at once, not before there are three, not at all.
    "ends-of-text": (
        f"{_PP1} pp_size=2; 1 start a prompt=40 new=6 biased=257 bias=100.0; 1 start b prompt=9 new=6 biased=257 bias=100.0 new_least=3; "
        "2 start c prompt=9 seed=1 new=3 biased=257 bias=100.0 ignore_eos=True; 3 start d prompt=9 seed=2 new=4 stop=257 biased=257 bias=100.0 ignore_eos=True"
    ),
    # Grammars that are new, known, shared, and late; beside requests without one.
    "grammars": (
        f"{_PP1} pp_size=2; 1 start a prompt=20 new=9 regex=[a-c]{{5}}; 1 start b prompt=20 seed=1 new=4; "
        "2 start c prompt=40 seed=2 new=9 regex=[a-c]{5}; 4 start d prompt=9 seed=3 new=3 regex=[p-z]{4}; 14 start e prompt=9 seed=4 new=9 regex=[a-c]{5} ignore_eos=True"
    ),
    "grammars-held": (
        f"{_PP1}; 1 hold-grammars; 1 start a prompt=20 new=6 regex=[a-c]{{3}}; 1 start b prompt=20 seed=1 new=6 regex=[a-c]{{3}}; "
        "2 start c prompt=20 seed=2 new=3; 3 start d prompt=9 seed=3 new=4 regex=[p-z]{2}; 9 release-grammars count=1; 12 release-grammars"
    ),
    # The request that asked first for a grammar goes, the other one stays; another grammar cannot be compiled.
    "grammars-in-vain": (
        f"{_PP1}; 1 hold-grammars; 1 start a prompt=20 new=6 regex=[a-c]{{3}}; 1 start b prompt=20 seed=1 new=6 regex=[a-c]{{3}}; "
        "3 abort a; 5 release-grammars; 14 fail-grammar; 14 start c prompt=20 seed=2 new=3 regex=[x-z]{2}; 14 start d prompt=9 seed=3 new=3"
    ),
    # The automaton goes on where the output was, after a retraction, in a pool that is too small.
    "grammars-full-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44; 1 start a prompt=13 new=10 regex=[a-z]{3}x[0-9]{5}; "
        "1 start b prompt=12 seed=1 new=10; 3 start c prompt=9 seed=2 new=10 regex=[a-z]{3}x[0-9]{5}"
    ),
    # No grammar is kept without a user, and users take turns.
    "grammars-forgotten": (
        "max_cached_grammars=0 max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=5 regex=[a-c]{2}; "
        "1 start b prompt=20 seed=1 new=5 regex=[a-c]{2}; 2 start c prompt=20 seed=2 new=5 regex=[p-z]{2}; 20 start d prompt=20 seed=3 new=5 regex=[a-c]{2}"
    ),
    # One prompt, several answers.
    "choices": f"{_PP1} pp_size=2; " + "; ".join(f"1 start n{i} prompt=40 new=4 temperature=1.0 draw={i}" for i in range(4)),
    # Urgent and other requests decode in a pool that is too small for them.
    "priorities-without-pages": (
        "pp_size=2 schedule_policy=priority page_size=4 chunked_prefill_size=16 max_total_tokens=44; "
        "1 start a prompt=13 new=10; 1 start b prompt=12 seed=1 new=10 priority=1; 3 start c prompt=9 seed=2 new=6 priority=1"
    ),
    # More start in one step than may overtake another one: none does.
    "many-at-once": "page_size=4 chunked_prefill_size=64 max_total_tokens=256; " + "; ".join(f"1 start r{i} prompt=2 seed={i} new=1" for i in range(22)),
    "many-decodes": "chunked_prefill_size=32 max_total_tokens=256; " + "; ".join(f"1 start r{i} prompt=5 seed={i} new=6" for i in range(5)),
    # Prompt logprobs: of a split prompt, beside a cached prefix of it, and of a part of the prompt only.
    "scored": (
        f"{_PP1} pp_size=2; 1 start a prompt=70 new=2 logprobs_from=0; 12 start b prompt=70 new=2 logprobs_from=0; "
        "13 start c prompt=70 new=2 logprobs_from=40; 14 start d prompt=100 new=2"
    ),
    # Chunks that end in the middle of a page, several in flight, beside decodes.
    "scored-mixed": (
        "pp_size=2 pp_async_depth=1 mixed_chunk=True chunked_prefill_size=24 max_total_tokens=512; 1 start a prompt=10 new=8; "
        "3 start b prompt=61 seed=1 new=2 logprobs_from=5; 4 start c prompt=61 seed=1 new=3 logprobs_from=30"
    ),
    # Sent back in the middle of the prompt, and while it decodes: nothing is told twice, and nothing is lost.
    "scored-and-paused": (
        "pp_size=2 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=60 new=2 logprobs_from=3; 3 pause mode=retract; "
        "7 continue; 9 pause mode=retract; 12 continue"
    ),
    # Prompts in one microbatch, each with values of its own; one of them is gone when these are here.
    "scored-together": (
        "pp_size=2 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=9 new=2 logprobs_from=2; "
        "1 start b prompt=12 seed=1 new=2 logprobs_from=0; 1 start c prompt=20 seed=2 new=0 logprobs_from=4; 2 abort a"
    ),
    "scored-without-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44; 1 start a prompt=13 new=10 logprobs_from=0; "
        "1 start b prompt=12 seed=1 new=10 logprobs_from=4; 3 start c prompt=9 seed=2 new=6 logprobs_from=0"
    ),
    # Beside requests that guess, and guessing themselves once their prompt is told.
    "drafts-beside-scores": (
        "pp_size=2 mixed_chunk=True speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=160; 1 start a prompt=20 new=12; 6 start b prompt=30 seed=1 new=8 logprobs_from=2; 8 start c prompt=20 new=0"
    ),
    # A cache warm-up: nothing is said. What it left is hit.
    "prefill-only": (
        f"{_PP1} pp_size=2; 1 start a prompt=70 new=0; 2 start b prompt=64 seed=1 new=0 logprobs_from=8; 12 start c prompt=70 new=2; "
        "13 start d prompt=64 seed=1 new=0"
    ),
    "prefill-only-fails": f"{_PP1} pp_size=2; 1 start a prompt=20 new=0; 1 fail; 6 start b prompt=40 new=2",
    "prefill-only-deep": f"{_PP4}; 1 start a prompt=125 new=0; 2 start b prompt=20 seed=1 new=0; 3 pause mode=retract; 6 continue",
    **{
        f"stops-at-{place}": f"{_PP1} pp_size=2; 1 start a prompt=40 new=4 stop={token}; 2 start b prompt=20 seed=1 new=4"
        for place, token in enumerate(STOP_TOKENS, 1)
    },
    # One place for two adapters: each makes room for the other when it is idle, and the model itself needs none.
    "adapters-in-turn": (
        f"{_PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=40 new=5 lora=x; "
        "6 start b prompt=40 new=3 lora=y; 7 start c prompt=40 new=4; 9 start d prompt=40 new=2 lora=x"
    ),
    # The same prompt by two adapters and by the model itself, in one batch, on four stages.
    "adapters-in-a-batch": (
        f"{_PP4} max_loras=2; 1 load-lora name=x; 1 load-lora name=y seed=2; 16 start a prompt=70 new=4 lora=x; "
        "16 start b prompt=70 new=4 lora=y; 16 start c prompt=70 new=4; 30 start d prompt=70 new=2 lora=x"
    ),
    # A name that gets other weights: what the old ones computed is of no use to the new ones.
    "adapter-again": (
        f"{_PP1} pp_size=2 max_loras=2; 1 load-lora name=x; 5 start a prompt=40 new=3 lora=x; 20 unload-lora name=x; "
        "24 load-lora name=x seed=2; 28 start b prompt=40 new=3 lora=x"
    ),
    "adapter-unloaded-later": (
        f"{_PP4} max_loras=1; 1 load-lora name=x; 9 start a prompt=125 new=2 lora=x; 11 unload-lora name=x timeout_s=5.0; "
        "13 start b prompt=20 new=2 lora=x"
    ),
    "adapter-unload-gives-up": (
        f"{_PP4} max_loras=1; 1 load-lora name=x; 9 start a prompt=125 new=2 lora=x; 10 hold; "
        "11 unload-lora name=x timeout_s=1.0; 13 advance seconds=2.0; 16 release"
    ),
    # Adapters of requests that are sent back to the queue, in a pool that is too small.
    "adapters-without-pages": (
        f"{_SMALL} max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=13 new=10 lora=x; "
        "6 start b prompt=12 seed=1 new=10 lora=x; 8 start c prompt=9 seed=2 new=6 lora=y; 9 start d prompt=9 seed=2 new=2"
    ),
    # Requests of a resident adapter keep coming past one that waits for a place: for a while, not for ever.
    "adapter-passed-over": (
        "max_loras=1 chunked_prefill_size=64 max_total_tokens=512; 1 load-lora name=x; 1 load-lora name=y seed=2; "
        "4 start a prompt=5 new=30 lora=y; 5 start z prompt=5 seed=1 new=1 lora=x; "
        + "; ".join(f"{6 + i} start s{i} prompt=5 seed={i + 2} new=1 lora=y" for i in range(20))
    ),
    "adapter-fails": (
        f"{_PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=40 new=2 lora=x; 6 fail; "
        "14 start b prompt=40 new=2 lora=x"
    ),
    "adapters-by-priority": (
        "schedule_policy=priority priority_preemption=True max_running_requests=2 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=48 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 5 start a prompt=13 new=8 lora=x; "
        "5 start b prompt=12 seed=1 new=8; 9 start c prompt=14 seed=2 new=3 priority=2 lora=y; 10 start d prompt=6 seed=3 new=2 priority=1"
    ),
    # Windows beside adapters: the second pool shares no prefix between them either.
    "windowed-adapters": (
        "model=embedded-window pp_size=2 chunked_prefill_size=32 max_total_tokens=1024 max_loras=1; 1 load-lora name=x; "
        "5 start a prompt=150 new=4 lora=x; 9 start b prompt=150 new=3; 30 start c prompt=150 new=3 lora=x"
    ),
    # What is guessed, told of prompts, forced and ended in time is of the request's own adapter.
    "drafts-of-adapters": (
        "speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=16 max_total_tokens=160 max_loras=2; "
        "1 load-lora name=x; 1 load-lora name=y seed=2; 5 start a prompt=20 new=16 lora=x; 5 start b prompt=20 new=12 lora=y; 6 start c prompt=20 new=9"
    ),
    "scores-of-adapters": (
        f"{_PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 5 start a prompt=70 new=2 lora=x; 14 start b prompt=70 new=0 logprobs_from=40 lora=x; "
        "15 start c prompt=70 new=2 logprobs_from=40"
    ),
    # The one that waits for its grammar keeps no place for its adapter.
    "grammars-of-adapters": (
        f"{_PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 5 hold-grammars; "
        "6 start a prompt=20 new=4 lora=x regex=[a-c]{3}; 7 start b prompt=40 new=3 lora=y; 8 start c prompt=40 new=3 lora=x; 24 release-grammars"
    ),
    "time-limits-of-adapters": (
        f"{_PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=70 new=8 timeout_s=2.0 lora=x; "
        "7 start b prompt=20 seed=1 new=3 waiting_timeout_s=1.0 lora=y; 8 unload-lora name=x timeout_s=4.0; 10 advance seconds=1.0; 12 advance seconds=1.0"
    ),
    "depth-first-adapters": (
        "schedule_policy=dfs-weight max_running_requests=1 page_size=4 chunked_prefill_size=32 max_total_tokens=128 max_loras=1; "
        "1 load-lora name=x; 4 start a prompt=20 new=3 lora=x; 8 start b prompt=20 new=2; 9 start c prompt=20 new=2 lora=x; 10 start d prompt=20 new=2"
    ),
    # The second tier: a prompt leaves for the host and comes back, for two at once.
    "host-round-trip": (
        f"{_PP1} pp_size=2 host_kv_tokens=512; 1 start a prompt=70 new=2; 9 evict; 9 start b prompt=20 seed=1 new=2; "
        "16 start c prompt=70 new=3; 17 start d prompt=70 new=2"
    ),
    "host-deep": (
        f"{_PP4} host_kv_tokens=256; 1 start a prompt=125 new=2; 18 evict; 19 start b prompt=20 seed=1 new=2; 30 start c prompt=125 new=2; "
        "31 start d prompt=100 new=0"
    ),
    # Room is made on both tiers by what is loaded.
    "host-without-places": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=48 host_kv_tokens=24 pp_async_depth=1; 1 start a prompt=20 new=2; "
        "7 evict; 7 start b prompt=5 seed=1 new=2; 12 start c prompt=44 seed=2 new=2; 24 start d prompt=20 new=6; 25 start e prompt=20 new=3"
    ),
    # Asked for again while it is on its way, and aborted while it is loaded.
    "host-copies-in-flight": (
        f"{_PP1} pp_size=2 host_kv_tokens=512; 1 start a prompt=40 new=2; 9 evict; 9 start b prompt=20 seed=1 new=2; 10 start c prompt=40 new=2; "
        "22 evict; 22 start d prompt=40 new=2; 23 abort d; 26 start e prompt=40 new=2"
    ),
    # Pages come and go by themselves, in a pool that is too small.
    "host-full-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44 host_kv_tokens=40 schedule_policy=lpm; 1 start a prompt=13 new=8; "
        "1 start b prompt=12 seed=1 new=8; 3 start c prompt=20 seed=2 new=4; 16 start d prompt=13 new=4; 20 start e prompt=20 seed=2 new=4"
    ),
    "host-and-weights": (
        f"{_PP1} host_kv_tokens=512; 1 start a prompt=40 new=2; 7 evict; 7 start b prompt=20 seed=1 new=2; 14 update seed=3; "
        "20 start c prompt=40 new=2"
    ),
    "host-fails": (
        f"{_PP1} pp_size=2 host_kv_tokens=512; 1 start a prompt=40 new=2; 9 evict; 9 fail; 9 start b prompt=20 seed=1 new=2; "
        "14 start c prompt=40 new=2; 20 evict; 20 start d prompt=20 seed=2 new=2; 26 fail; 26 start e prompt=40 new=2; 31 start f prompt=40 new=2"
    ),
    # What guesses, scores and adapters make of pages that come back.
    "drafts-on-the-host": (
        "speculative_algorithm=draft_model speculative_draft_model=embedded page_size=4 chunked_prefill_size=16 max_total_tokens=160 "
        "host_kv_tokens=80; 1 start a prompt=20 new=8; 9 evict; 9 start b prompt=9 seed=1 new=4; 16 start c prompt=20 new=8 logprobs_from=10"
    ),
    "host-and-adapters": (
        f"{_PP1} host_kv_tokens=512 max_loras=1; 1 load-lora name=x; 4 start a prompt=40 new=2 lora=x; 10 evict; 10 start b prompt=40 new=2; "
        "16 evict; 16 start c prompt=40 new=2 lora=x; 22 start d prompt=40 new=2 lora=x"
    ),
    **dict(_boundaries()),
    **dict(_long_queues()),
}  # fmt: skip
