"""Base workloads of the second tier of KV."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1, PP4

__all__ = ["HOST_TIER"]

HOST_TIER: Final[dict[str, str]] = {
    # The second tier: a prompt leaves for the host and comes back, for two at once.
    "host-round-trip": (
        f"{PP1} pp_size=2 host_kv_tokens=512; 1 start a prompt=70 new=2; 9 evict; 9 start b prompt=20 seed=1 new=2; "
        "16 start c prompt=70 new=3; 17 start d prompt=70 new=2"
    ),
    "host-deep": (
        f"{PP4} host_kv_tokens=256; 1 start a prompt=125 new=2; 18 evict; 19 start b prompt=20 seed=1 new=2; 30 start c prompt=125 new=2; "
        "31 start d prompt=100 new=0"
    ),
    # Room is made on both tiers by what is loaded.
    "host-without-places": (
        "page_size=4 chunked_prefill_size=16 max_total_tokens=48 host_kv_tokens=24 pp_async_depth=1; 1 start a prompt=20 new=2; "
        "7 evict; 7 start b prompt=5 seed=1 new=2; 12 start c prompt=44 seed=2 new=2; 24 start d prompt=20 new=6; 25 start e prompt=20 new=3"
    ),
    # Asked for again while it is on its way, and aborted while it is loaded.
    "host-copies-in-flight": (
        f"{PP1} pp_size=2 host_kv_tokens=512; 1 start a prompt=40 new=2; 9 evict; 9 start b prompt=20 seed=1 new=2; 10 start c prompt=40 new=2; "
        "22 evict; 22 start d prompt=40 new=2; 23 abort d; 26 start e prompt=40 new=2"
    ),
    # Pages come and go by themselves, in a pool that is too small.
    "host-full-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44 host_kv_tokens=40 schedule_policy=lpm; 1 start a prompt=13 new=8; "
        "1 start b prompt=12 seed=1 new=8; 3 start c prompt=20 seed=2 new=4; 16 start d prompt=13 new=4; 20 start e prompt=20 seed=2 new=4"
    ),
    "host-and-weights": (
        f"{PP1} host_kv_tokens=512; 1 start a prompt=40 new=2; 7 evict; 7 start b prompt=20 seed=1 new=2; 14 update seed=3; "
        "20 start c prompt=40 new=2"
    ),
    "host-fails": (
        f"{PP1} pp_size=2 host_kv_tokens=512; 1 start a prompt=40 new=2; 9 evict; 9 fail; 9 start b prompt=20 seed=1 new=2; "
        "14 start c prompt=40 new=2; 20 evict; 20 start d prompt=20 seed=2 new=2; 26 fail; 26 start e prompt=40 new=2; 31 start f prompt=40 new=2"
    ),
    # What guesses, scores and LoRAs make of pages that come back.
    "drafts-on-the-host": (
        "speculative_algorithm=draft_model speculative_draft_model=embedded page_size=4 chunked_prefill_size=16 max_total_tokens=160 "
        "host_kv_tokens=80; 1 start a prompt=20 new=8; 9 evict; 9 start b prompt=9 seed=1 new=4; 16 start c prompt=20 new=8 logprobs_from=10"
    ),
}  # fmt: skip
