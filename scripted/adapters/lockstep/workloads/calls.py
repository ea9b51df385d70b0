"""Base workloads of calls and faults: flushes, pauses, updates, profiles, failures, time limits."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1, PP4

__all__ = ["CALLS"]

CALLS: Final[dict[str, str]] = {
    "same-rid-again": f"{PP1} pp_size=2; 1 start a prompt=40 new=3; 4 abort a; 4 start a prompt=50 seed=1 new=2",
    "deferred-flush-gives-up": f"{PP4}; 1 start a prompt=125 new=2; 2 hold; 3 flush timeout_s=1.0; 5 advance seconds=2.0; 8 release",
    "paused-with-a-queue": (
        "pp_size=2 max_running_requests=2 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=5; "
        "1 start b prompt=20 seed=1 new=5; 1 start c prompt=20 seed=2 new=2; 6 pause mode=retract; 12 flush; 14 continue"
    ),
    "paused-mid-prompt": (
        "pp_size=2 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=60 new=2; 3 pause mode=retract; 7 continue"
    ),
    "paused-in-place": f"{PP1} pp_size=2; 1 start a prompt=20 new=6; 5 pause mode=in_place; 12 continue",
    # What a failed microbatch wrote must not become a shared prefix.
    "failed-chunk": f"{PP1} pp_size=2; 1 start a prompt=70 new=2; 2 fail; 8 start b prompt=70 new=2",
    "weight-update": f"{PP4}; 1 start a prompt=70 new=2; 22 update; 30 start b prompt=70 new=2",
    "failed-update": f"{PP1} pp_size=2; 1 start a prompt=70 new=2; 5 update timeout_s=1.0; 6 fail; 20 start b prompt=70 new=2",
    # A microbatch fails after one of its requests was aborted.
    "failed-and-aborted": f"{PP1} pp_size=2; 1 start a prompt=70 new=2; 1 start b prompt=9 seed=1 new=4; 2 fail; 3 abort a; 8 start c prompt=70 new=2",
    # Profiles take a place in the pipeline beside requests; one at a time.
    "profiled": (
        f"{PP1} pp_size=2; 1 start a prompt=40 new=4; 2 profile; 3 profile; 5 profile-end; 6 profile-end; 7 start b prompt=20 seed=1 new=2; "
        "8 profile; 9 pause mode=in_place; 11 profile-end; 13 continue; 20 profile"
    ),
    # Time runs out: for what waits, for what is being computed, for what was sent back and is not bound to start again.
    "time-limits": (
        f"{PP1} pp_size=2 max_running_requests=2; 1 start a prompt=70 new=6 timeout_s=2.0; 2 start b prompt=40 seed=1 new=6; "
        "3 start c prompt=20 seed=2 new=2 timeout_s=4.0 waiting_timeout_s=1.0; 4 start d prompt=9 seed=3 new=2 waiting_timeout_s=2.0; "
        "6 advance seconds=1.0; 9 advance seconds=1.0"
    ),
    "time-limit-while-paused": (
        f"{PP1} pp_size=2; 1 start a prompt=40 new=6 timeout_s=2.0; 4 pause mode=in_place; 5 start b prompt=9 seed=1 new=2 waiting_timeout_s=1.0; "
        "6 advance seconds=2.0; 9 continue"
    ),
    "time-limit-while-sent-back": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44 waiting_timeout_s=1.0; 1 start a prompt=13 new=10; "
        "1 start b prompt=12 seed=1 new=10 timeout_s=2.0; 3 start c prompt=9 seed=2 new=6; 12 advance seconds=1.0; 14 advance seconds=1.0"
    ),
}  # fmt: skip
