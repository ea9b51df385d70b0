"""Base workloads of LoRA adapters."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1, PP4, SMALL

__all__ = ["LORAS"]

LORAS: Final[dict[str, str]] = {
    # One place for two LoRAs: each makes room for the other when it is idle, and the model itself needs none.
    "loras-in-turn": (
        f"{PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=40 new=5 lora=x; "
        "6 start b prompt=40 new=3 lora=y; 7 start c prompt=40 new=4; 9 start d prompt=40 new=2 lora=x"
    ),
    # The same prompt by two LoRAs and by the model itself, in one batch, on four stages.
    "loras-in-a-batch": (
        f"{PP4} max_loras=2; 1 load-lora name=x; 1 load-lora name=y seed=2; 16 start a prompt=70 new=4 lora=x; "
        "16 start b prompt=70 new=4 lora=y; 16 start c prompt=70 new=4; 30 start d prompt=70 new=2 lora=x"
    ),
    # A name that gets other weights: what the old ones computed is of no use to the new ones.
    "lora-again": (
        f"{PP1} pp_size=2 max_loras=2; 1 load-lora name=x; 5 start a prompt=40 new=3 lora=x; 20 unload-lora name=x; "
        "24 load-lora name=x seed=2; 28 start b prompt=40 new=3 lora=x"
    ),
    "lora-unloaded-later": (
        f"{PP4} max_loras=1; 1 load-lora name=x; 9 start a prompt=125 new=2 lora=x; 11 unload-lora name=x timeout_s=5.0; "
        "13 start b prompt=20 new=2 lora=x"
    ),
    "lora-unload-gives-up": (
        f"{PP4} max_loras=1; 1 load-lora name=x; 9 start a prompt=125 new=2 lora=x; 10 hold; "
        "11 unload-lora name=x timeout_s=1.0; 13 advance seconds=2.0; 16 release"
    ),
    # LoRAs of requests that are sent back to the queue, in a pool that is too small.
    "loras-without-pages": (
        f"{SMALL} max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=13 new=10 lora=x; "
        "6 start b prompt=12 seed=1 new=10 lora=x; 8 start c prompt=9 seed=2 new=6 lora=y; 9 start d prompt=9 seed=2 new=2"
    ),
    # Requests of a resident LoRA keep coming past one that waits for a place: for a while, not for ever.
    "lora-passed-over": (
        "max_loras=1 chunked_prefill_size=64 max_total_tokens=512; 1 load-lora name=x; 1 load-lora name=y seed=2; "
        "4 start a prompt=5 new=30 lora=y; 5 start z prompt=5 seed=1 new=1 lora=x; "
        + "; ".join(f"{6 + i} start s{i} prompt=5 seed={i + 2} new=1 lora=y" for i in range(20))
    ),
    "lora-fails": (
        f"{PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=40 new=2 lora=x; 6 fail; "
        "14 start b prompt=40 new=2 lora=x"
    ),
    "loras-by-priority": (
        "schedule_policy=priority priority_preemption=True max_running_requests=2 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=48 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 5 start a prompt=13 new=8 lora=x; "
        "5 start b prompt=12 seed=1 new=8; 9 start c prompt=14 seed=2 new=3 priority=2 lora=y; 10 start d prompt=6 seed=3 new=2 priority=1"
    ),
    # Windows beside LoRAs: the second pool shares no prefix between them either.
    "windowed-loras": (
        "model=embedded-window pp_size=2 chunked_prefill_size=32 max_total_tokens=1024 max_loras=1; 1 load-lora name=x; "
        "5 start a prompt=150 new=4 lora=x; 9 start b prompt=150 new=3; 30 start c prompt=150 new=3 lora=x"
    ),
    # What is guessed, told of prompts, forced and ended in time is of the request's own LoRA.
    "drafts-of-loras": (
        "speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=16 max_total_tokens=160 max_loras=2; "
        "1 load-lora name=x; 1 load-lora name=y seed=2; 5 start a prompt=20 new=16 lora=x; 5 start b prompt=20 new=12 lora=y; 6 start c prompt=20 new=9"
    ),
    "scores-of-loras": (
        f"{PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 5 start a prompt=70 new=2 lora=x; 14 start b prompt=70 new=0 logprobs_from=40 lora=x; "
        "15 start c prompt=70 new=2 logprobs_from=40"
    ),
    # The one that waits for its grammar keeps no place for its LoRA.
    "grammars-of-loras": (
        f"{PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 5 hold-grammars; "
        "6 start a prompt=20 new=4 lora=x regex=[a-c]{3}; 7 start b prompt=40 new=3 lora=y; 8 start c prompt=40 new=3 lora=x; 24 release-grammars"
    ),
    "time-limits-of-loras": (
        f"{PP1} pp_size=2 max_loras=1; 1 load-lora name=x; 1 load-lora name=y seed=2; 6 start a prompt=70 new=8 timeout_s=2.0 lora=x; "
        "7 start b prompt=20 seed=1 new=3 waiting_timeout_s=1.0 lora=y; 8 unload-lora name=x timeout_s=4.0; 10 advance seconds=1.0; 12 advance seconds=1.0"
    ),
    "depth-first-loras": (
        "schedule_policy=dfs-weight max_running_requests=1 page_size=4 chunked_prefill_size=32 max_total_tokens=128 max_loras=1; "
        "1 load-lora name=x; 4 start a prompt=20 new=3 lora=x; 8 start b prompt=20 new=2; 9 start c prompt=20 new=2 lora=x; 10 start d prompt=20 new=2"
    ),
    "host-and-loras": (
        f"{PP1} host_kv_tokens=512 max_loras=1; 1 load-lora name=x; 4 start a prompt=40 new=2 lora=x; 10 evict; 10 start b prompt=40 new=2; "
        "16 evict; 16 start c prompt=40 new=2 lora=x; 22 start d prompt=40 new=2 lora=x"
    ),
}  # fmt: skip
