"""Base workloads of speculative decoding: guesses that are looked up, and those of a draft model."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

__all__ = ["DRAFTS"]

DRAFTS: Final[dict[str, str]] = {
    # Guesses that are verified several at once: alone, beside others, in little memory, over window layers.
    "drafts": (
        "speculative_algorithm=ngram page_size=4 chunked_prefill_size=16 max_total_tokens=160; 1 start a prompt=20 new=20; "
        "3 start b prompt=9 seed=1 new=14; 20 start c prompt=20 new=9"
    ),
    "drafts-deep": (
        "pp_size=4 pp_async_depth=1 speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=200; 1 start a prompt=13 new=16; 2 start b prompt=12 seed=1 new=12; 3 start c prompt=30 seed=2 new=8"
    ),
    "drafts-tight": (
        "pp_size=2 speculative_algorithm=ngram speculative_ngram_min=1 speculative_num_draft_tokens=6 page_size=4 "
        "chunked_prefill_size=16 max_total_tokens=48; 1 start a prompt=13 new=14; 1 start b prompt=12 seed=1 new=14"
    ),
    "drafts-stop": (
        "speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=32 max_total_tokens=128; "
        "1 start a prompt=20 new=20 stop=35; 2 start b prompt=20 seed=3 new=20 stop=34"
    ),
    # Guesses that fail often enough for their requests to rest.
    "drafts-resting": (
        "speculative_algorithm=ngram speculative_ngram_min=1 speculative_ngram_max=1 speculative_num_draft_tokens=1 page_size=16 "
        "chunked_prefill_size=64 max_total_tokens=320; 1 start a prompt=20 new=30; 2 start b prompt=20 seed=1 new=30"
    ),
    # Guesses of a draft model, among them tokens at which a request stops.
    "drafts-of-a-model": (
        "speculative_algorithm=draft_model speculative_draft_model=embedded page_size=4 chunked_prefill_size=64 "
        "max_total_tokens=200; 1 start a prompt=40 new=8 stop=120; 2 start b prompt=40 new=14; 12 start c prompt=40 new=8 stop=91; "
        "13 start d prompt=44 seed=1 new=20"
    ),
    "drafts-windowed": (
        "model=embedded-window speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=64 "
        "max_prefill_tokens=64 max_total_tokens=512 max_window_tokens=280; 1 start a prompt=100 new=16; 9 start b prompt=90 seed=1 new=12"
    ),
    # Beside requests that guess, and guessing themselves once their prompt is told.
    "drafts-beside-scores": (
        "pp_size=2 mixed_chunk=True speculative_algorithm=ngram speculative_ngram_min=1 page_size=4 chunked_prefill_size=16 "
        "max_total_tokens=160; 1 start a prompt=20 new=12; 6 start b prompt=30 seed=1 new=8 logprobs_from=2; 8 start c prompt=20 new=0"
    ),
}  # fmt: skip
