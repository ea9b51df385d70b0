"""Base workloads of what a step launches: chunks, decodes, mixed and small microbatches, many stages."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1, PP4

__all__ = ["LAUNCHING"]

LAUNCHING: Final[dict[str, str]] = {
    "no-chunks": "pp_size=2 chunked_prefill_size=-1 max_total_tokens=256; 1 start a prompt=70 new=3; 2 start b prompt=33 new=3",
    "at-the-context-limit": (
        "context_length=40 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=35 new=30; 1 start b prompt=12 seed=1 new=2"
    ),
    "late-results": f"{PP4}; 1 start a prompt=100 new=3; 2 hold; 3 start b prompt=100 new=2; 12 release count=1; 14 release",
    # Prompts that leave room for a few of the decodes: these take turns.
    "mixed-turns": (
        "mixed_chunk=True chunked_prefill_size=16 max_total_tokens=512; "
        + "; ".join(f"1 start r{i} prompt=3 seed={i} new=6" for i in range(4)) + "; "
        + "; ".join(f"{4 + i} start p{i} prompt=15 seed={i + 9} new=1" for i in range(4))
    ),
    # More are ready to decode than the share of a stage, beside a prompt that leaves room for them.
    "mixed-shares": (
        "pp_size=2 mixed_chunk=True page_size=4 chunked_prefill_size=32 max_total_tokens=256; "
        + "; ".join(f"1 start r{i} prompt=5 seed={i} new=5" for i in range(5)) + "; 3 start p prompt=9 seed=9 new=2; 4 start q prompt=70 seed=10 new=2"
    ),
    # A bound on the requests of a microbatch: of prompts, beside a chunk, of decodes, of both.
    "small-microbatches": (
        f"{PP1} pp_size=2 pp_max_micro_batch_size=2; 1 start a prompt=40 new=2; " + "; ".join(f"1 start r{i} prompt=3 seed={i + 1} new=4" for i in range(6))
    ),
    "small-mixed-microbatches": (
        f"{PP1} pp_size=2 pp_async_depth=1 mixed_chunk=True pp_max_micro_batch_size=2; "
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
    "many-decodes": "chunked_prefill_size=32 max_total_tokens=256; " + "; ".join(f"1 start r{i} prompt=5 seed={i} new=6" for i in range(5)),
    # A cache warm-up: nothing is said. What it left is hit.
    "prefill-only": (
        f"{PP1} pp_size=2; 1 start a prompt=70 new=0; 2 start b prompt=64 seed=1 new=0 logprobs_from=8; 12 start c prompt=70 new=2; "
        "13 start d prompt=64 seed=1 new=0"
    ),
    "prefill-only-fails": f"{PP1} pp_size=2; 1 start a prompt=20 new=0; 1 fail; 6 start b prompt=40 new=2",
    "prefill-only-deep": f"{PP4}; 1 start a prompt=125 new=0; 2 start b prompt=20 seed=1 new=0; 3 pause mode=retract; 6 continue",
}  # fmt: skip
