"""The library of base workloads by name: first ``workloads.txt``, then workloads at the bounds.

More workloads find more than more depth: a sweep of one event over all of them beats two events over one.
"""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from scripted.sdk.workloads import read_workloads

FLAGSHIP: Final = "chunked-alone"


def _bounds(small: str, windowed: str) -> Iterator[tuple[str, str]]:
    """Yield workloads at each limit, then at its two neighbours: pages, rows, budget, queue, deadline."""
    for beside in (0, -1, 1):
        name = {-1: "below", 0: "at", 1: "above"}[beside]
        yield from _bounds_of_memory(name, beside)
        yield from _bounds_of_counts(name, beside, small)
        yield from _bounds_of_windows(name, beside, windowed)
        yield from _bounds_of_time(name, beside, small)


def _bounds_of_memory(name: str, beside: int) -> Iterator[tuple[str, str]]:
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


def _bounds_of_counts(name: str, beside: int, small: str) -> Iterator[tuple[str, str]]:
    yield (
        f"{name}-the-budget",
        f"{small}; 1 start a prompt={16 + beside} new=2; 1 start b prompt={12 + beside} seed=1 new=2; 2 start c prompt=4 seed=2 new=2",
    )
    yield (
        f"{name}-the-rows",
        f"{small} max_running_requests=2; "
        + "; ".join(f"1 start r{i} prompt=3 seed={i} new=2" for i in range(2 + beside)),
    )
    yield (
        f"{name}-the-queue",
        (
            f"{small} max_running_requests=1 max_queued_requests=2; 1 start a prompt=5 new=6; "
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
        f"{small}; 1 start a prompt=9 new=3; 2 hold; 3 flush timeout_s=1.0; 5 advance seconds={1 + beside / 4}; 8 release",
    )


def _bounds_of_windows(name: str, beside: int, windowed: str) -> Iterator[tuple[str, str]]:
    # A more urgent request, in a window pool that the other one must free first.
    yield (
        f"{name}-the-window-pool",
        (
            f"{windowed} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens={176 + 16 * beside}; "
            "1 start a prompt=70 new=5; 7 start b prompt=75 seed=1 new=3 priority=1; 14 start c prompt=75 seed=1 new=2"
        ),
    )
    # A request that hits more than a window, beside a running one.
    yield (
        f"{name}-the-window-pool-after-a-hit",
        (
            f"{windowed} max_total_tokens=512 max_window_tokens={192 + 16 * beside}; 1 start a prompt=110 new=1; "
            "9 start b prompt=70 seed=1 new=9; 15 start c prompt=130 new=2"
        ),
    )
    yield (
        f"{name}-a-window",
        f"{windowed} pp_async_depth=1 max_total_tokens=256 max_window_tokens=112; 1 start a prompt={80 + beside} new=3; 11 start b prompt={80 + beside} new=2",
    )


def _bounds_of_time(name: str, beside: int, small: str) -> Iterator[tuple[str, str]]:
    yield (
        f"{name}-the-time-limit",
        f"{small} pp_size=2; 1 start a prompt=29 new=8 timeout_s=1.0; 2 start b prompt=5 seed=1 new=2; 8 advance seconds={1 + beside / 4}",
    )
    yield (
        f"{name}-the-waiting-limit",
        (
            f"{small} max_running_requests=1; 1 start a prompt=5 new=6; 2 start b prompt=9 seed=1 new=2 waiting_timeout_s=1.0; "
            f"4 advance seconds={1 + beside / 4}"
        ),
    )


def _long_queues() -> Iterator[tuple[str, str]]:
    """Yield workloads with the longest queue that is ordered by prefix, and with one request more."""
    for name, count in (("at", 128), ("above", 129)):
        yield (
            f"{name}-the-ordered-queue",
            (
                "schedule_policy=lpm max_running_requests=1 page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start warm prompt=9 new=1; "
                + "; ".join(f"3 start r{i} prompt=2 seed={i + 1} new=1" for i in range(count - 1))
                + "; 3 start cached prompt=9 new=1; 4 abort-all"
            ),
        )


_TEXTS, _SHARED = read_workloads(Path(__file__).with_suffix(".txt"))
# In the order of a search.
TEXTS: Final = _TEXTS | dict(_bounds(_SHARED["SMALL"], _SHARED["WINDOWED"])) | dict(_long_queues())
