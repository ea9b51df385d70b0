"""Base workloads of the queue: policies, preemption, overtaking, refusals."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

__all__ = ["QUEUEING"]

QUEUEING: Final[dict[str, str]] = {
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
    "longest-prefix": (
        "schedule_policy=lpm max_running_requests=2 chunked_prefill_size=32 max_total_tokens=512; 1 start a prompt=40 new=3; "
        "2 start b prompt=40 seed=1 new=2; 2 start c prompt=60 new=2"
    ),
    "short-queue": (
        "max_queued_requests=2 max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=3; "
        "2 start b prompt=20 seed=1; 2 start c prompt=20 seed=2; 3 start d prompt=20 seed=3"
    ),
    # A big one waits for pages while small ones pass it.
    "passed-over": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=18 new=8; 2 start big prompt=33 seed=1 new=2; "
        "2 start c prompt=5 seed=2 new=2; 3 start d prompt=5 seed=3 new=2"
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
    # Urgent and other requests decode in a pool that is too small for them.
    "priorities-without-pages": (
        "pp_size=2 schedule_policy=priority page_size=4 chunked_prefill_size=16 max_total_tokens=44; "
        "1 start a prompt=13 new=10; 1 start b prompt=12 seed=1 new=10 priority=1; 3 start c prompt=9 seed=2 new=6 priority=1"
    ),
    # More start in one step than may overtake another one: none does.
    "many-at-once": "page_size=4 chunked_prefill_size=64 max_total_tokens=256; " + "; ".join(f"1 start r{i} prompt=2 seed={i} new=1" for i in range(22)),
}  # fmt: skip
