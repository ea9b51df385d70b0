"""Base workloads of pages and rows: hits, eviction, retraction, the pressure of an operator."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1

__all__ = ["MEMORY"]

MEMORY: Final[dict[str, str]] = {
    "no-cache": f"{PP1} radix_cache=False pp_size=2; 1 start a prompt=40 new=3; 2 start b prompt=40 new=3",
    # Room for one page less than all requests need: eviction of what none of them holds.
    "eviction": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=40; 1 start a prompt=17 new=2; 9 start b prompt=20 seed=1 new=3; "
        "16 start c prompt=17 new=3"
    ),
    "oversize": (
        "page_size=4 max_total_tokens=40 chunked_prefill_size=16; 1 start a prompt=50 new=2; 1 start b prompt=20 seed=1 new=2; "
        "2 start c prompt=30 seed=2 new=20; 3 start d prompt=6 seed=3 new=2"
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
    # Leaves are locked and left far more often than there are leaves; after that the one that was used longest ago still goes first.
    "left-often": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=64; 1 start a prompt=9 new=1; 3 start b prompt=9 seed=1 new=1; "
        "5 start c prompt=9 seed=2 new=1; 7 start d prompt=9 new=1; " + "9 pressure unlocked=0; 9 relieve; " * 40
        + "10 evict pages=1; 11 start e prompt=9 seed=1 new=1; 13 evict pages=2; 14 start f prompt=9 seed=2 new=1"
    ),
    "full-pages-deep": (
        "pp_size=4 pp_async_depth=2 page_size=4 chunked_prefill_size=16 max_total_tokens=48; 1 start a prompt=13 new=8; "
        "1 start b prompt=12 seed=1 new=8; 1 start c prompt=9 seed=2 new=8; 6 start d prompt=11 seed=3 new=4"
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
}  # fmt: skip
