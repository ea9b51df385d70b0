"""Base workloads of asynchronous scheduling: decodes that are planned before the token before them is known."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

__all__ = ["AHEAD"]

_AHEAD: Final = "async_scheduling=True page_size=4 chunked_prefill_size=16"

AHEAD: Final[dict[str, str]] = {
    "ahead": f"{_AHEAD} max_total_tokens=160; 1 start a prompt=10 new=8; 2 start b prompt=9 seed=1 new=6; 9 start c prompt=20 new=3",
    # The token that ends a request is known when one more is being computed.
    "ahead-of-a-stop": (
        f"{_AHEAD} max_total_tokens=160; 1 start a prompt=10 new=10 stop=117; 2 start b prompt=9 seed=1 new=8 stop=104; "
        "12 start c prompt=10 new=4"
    ),
    # No room to go ahead, and what is to give way is in flight.
    "ahead-tight": (
        f"{_AHEAD} max_total_tokens=48; 1 start a prompt=13 new=14; 1 start b prompt=12 seed=1 new=14; 3 start c prompt=9 seed=2 new=6"
    ),
    "ahead-preempted": (
        f"{_AHEAD} schedule_policy=priority priority_preemption=True max_running_requests=2 max_total_tokens=64; 1 start a prompt=13 new=9; "
        "1 start b prompt=12 seed=1 new=9; 6 start c prompt=14 seed=2 new=3 priority=2"
    ),
    "ahead-and-paused": (
        f"{_AHEAD} pp_async_depth=3 max_total_tokens=160; 1 start a prompt=10 new=8; 1 start b prompt=9 seed=1 new=8; 8 pause mode=retract; "
        "13 continue"
    ),
    # Counts of tokens and grammars have to know the token before.
    "ahead-of-counts": (
        f"{_AHEAD} max_total_tokens=160; 1 start a prompt=10 new=7 penalty=0.5; 1 start b prompt=9 seed=1 new=7; "
        "2 start c prompt=10 new=5 regex=[a-c]{9}"
    ),
    "ahead-deep": (
        f"{_AHEAD} pp_async_depth=3 mixed_chunk=True max_total_tokens=160; 1 start a prompt=10 new=8; 3 start b prompt=40 seed=1 new=5; "
        "5 start c prompt=9 seed=2 new=4 temperature=1.0 draw=3"
    ),
    "ahead-windowed": (
        "async_scheduling=True model=embedded-window page_size=4 chunked_prefill_size=64 max_prefill_tokens=64 max_total_tokens=512 "
        "max_window_tokens=280; 1 start a prompt=100 new=12; 5 start b prompt=90 seed=1 new=9"
    ),
}  # fmt: skip
