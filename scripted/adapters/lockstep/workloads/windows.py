"""Base workloads of models with window layers."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import WINDOWED

__all__ = ["WINDOWS"]

WINDOWS: Final[dict[str, str]] = {
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
        f"{WINDOWED} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens=128; 1 start a prompt=70 new=5; "
        "7 start b prompt=75 seed=1 new=3 priority=1; 13 start c prompt=40 seed=1 new=9; 16 start d prompt=75 seed=2 new=2 priority=2"
    ),
    "windowed-priorities-shared": (
        f"{WINDOWED} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens=160; 1 start w prompt=60 new=1; "
        "6 start a prompt=60 new=7; 6 start b prompt=60 new=7; 10 start c prompt=100 seed=1 new=2 priority=1"
    ),
    "windowed-priorities-exactly": (
        f"{WINDOWED} schedule_policy=priority priority_preemption=True max_total_tokens=512 max_window_tokens=112; 1 start w prompt=40 new=1; "
        "6 start a prompt=40 new=9; 6 start b prompt=40 new=9; 12 start c prompt=60 seed=1 new=2 priority=1"
    ),
    # Both pools are too small: what leaves the tree leaves the window pool.
    "windowed-eviction": (
        f"{WINDOWED} max_total_tokens=160 max_window_tokens=128; 1 start a prompt=70 new=2; 8 start b prompt=75 seed=1 new=2; "
        "16 start c prompt=70 new=12; 17 start d prompt=40 seed=2 new=8; 19 start e prompt=35 seed=3 new=2; 40 evict pages=1; 41 evict pages=3"
    ),
    "windowed-longest-prefix": (
        f"{WINDOWED} schedule_policy=lpm max_running_requests=1 max_total_tokens=640 max_window_tokens=112; 1 start a prompt=70 new=2; "
        "2 start b prompt=75 seed=1 new=2; 3 start c prompt=70 new=2; 3 start d prompt=40 seed=1 new=2; 3 start e prompt=90 new=2"
    ),
    "windowed-no-cache": f"{WINDOWED} radix_cache=False pp_size=2 max_total_tokens=256; 1 start a prompt=70 new=3; 2 start b prompt=70 new=3",
    "windowed-mixed": (
        "model=embedded-window pp_size=2 pp_async_depth=1 mixed_chunk=True page_size=4 chunked_prefill_size=16 max_total_tokens=512 "
        "max_window_tokens=200; 1 start a prompt=20 new=12; 2 start b prompt=66 seed=1 new=8; 6 start c prompt=90 seed=2 new=2"
    ),
    "windowed-pressed": (
        f"{WINDOWED} max_total_tokens=512 max_window_tokens=192; 1 start a prompt=70 new=4; 3 pressure window=3; 6 start b prompt=70 new=3; "
        "8 pressure window=5; 9 pressure window=1; 11 relieve; 16 pressure window=8; 17 start c prompt=75 seed=1 new=2; 22 pressure window=99; "
        "24 pressure window=9; 25 start d prompt=70 new=2; 30 relieve"
    ),
}  # fmt: skip
