"""Base workloads of one to three plain requests. A search begins with these: their sweeps are short and find most."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1, PP4

__all__ = ["BASIC", "FLAGSHIP"]

FLAGSHIP: Final = "chunked-alone"

BASIC: Final[dict[str, str]] = {
    # The flagship: between the last chunk and its result every queue is empty.
    FLAGSHIP: f"{PP4}; 1 start a prompt=125 new=2",
    "one-stage": f"{PP1}; 1 start a prompt=70 new=3",
    "names-with-a-common-prefix": f"{PP1} pp_size=2; 1 start r-1 prompt=20 new=4; 1 start r-10 prompt=20 seed=1 new=4",
    "deferred-flush": f"{PP4}; 1 start a prompt=125 new=2; 3 flush timeout_s=5.0",
    "one-stage-deep": f"{PP1} pp_async_depth=2; 1 start a prompt=70 new=3; 2 start b prompt=40 seed=1 new=3",
    "warm-prefix": f"{PP4}; 1 start warm prompt=96 new=1; 16 start a prompt=125 new=2",
    # Equal prompts of full pages: a fully cached prompt must still compute one token.
    "twins": f"{PP1}; 1 start a prompt=48 new=2; 8 start b prompt=48 new=2; 9 start c prompt=48 new=3",
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
}  # fmt: skip
