"""Base workloads of grammars."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1

__all__ = ["GRAMMARS"]

GRAMMARS: Final[dict[str, str]] = {
    # Grammars that are new, known, shared, and late; beside requests without one.
    "grammars": (
        f"{PP1} pp_size=2; 1 start a prompt=20 new=9 regex=[a-c]{{5}}; 1 start b prompt=20 seed=1 new=4; "
        "2 start c prompt=40 seed=2 new=9 regex=[a-c]{5}; 4 start d prompt=9 seed=3 new=3 regex=[p-z]{4}; 14 start e prompt=9 seed=4 new=9 regex=[a-c]{5} ignore_eos=True"
    ),
    "grammars-held": (
        f"{PP1}; 1 hold-grammars; 1 start a prompt=20 new=6 regex=[a-c]{{3}}; 1 start b prompt=20 seed=1 new=6 regex=[a-c]{{3}}; "
        "2 start c prompt=20 seed=2 new=3; 3 start d prompt=9 seed=3 new=4 regex=[p-z]{2}; 9 release-grammars count=1; 12 release-grammars"
    ),
    # The request that asked first for a grammar goes, the other one stays; another grammar cannot be compiled.
    "grammars-in-vain": (
        f"{PP1}; 1 hold-grammars; 1 start a prompt=20 new=6 regex=[a-c]{{3}}; 1 start b prompt=20 seed=1 new=6 regex=[a-c]{{3}}; "
        "3 abort a; 5 release-grammars; 14 fail-grammar; 14 start c prompt=20 seed=2 new=3 regex=[x-z]{2}; 14 start d prompt=9 seed=3 new=3"
    ),
    # The automaton goes on where the output was, after a retraction, in a pool that is too small.
    "grammars-full-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44; 1 start a prompt=13 new=10 regex=[a-z]{3}x[0-9]{5}; "
        "1 start b prompt=12 seed=1 new=10; 3 start c prompt=9 seed=2 new=10 regex=[a-z]{3}x[0-9]{5}"
    ),
    # No grammar is kept without a user, and users take turns.
    "grammars-forgotten": (
        "max_cached_grammars=0 max_running_requests=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=5 regex=[a-c]{2}; "
        "1 start b prompt=20 seed=1 new=5 regex=[a-c]{2}; 2 start c prompt=20 seed=2 new=5 regex=[p-z]{2}; 20 start d prompt=20 seed=3 new=5 regex=[a-c]{2}"
    ),
    # Late in their outputs they can lead nowhere: alone, beside others, in the token of the last chunk, and not reached.
    "grammars-to-nowhere": (
        f"{PP1} pp_size=2 mixed_chunk=True; 1 start a prompt=20 new=9 regex=[a-c]{{3}} dead_end=True; 1 start b prompt=20 seed=1 new=6; "
        "2 start c prompt=40 seed=2 new=9 regex=[a-c]{3} dead_end=True; 3 start d prompt=9 seed=3 new=2 regex=[a-c]{3} dead_end=True; 5 start e prompt=9 seed=4 new=6 regex=[p-z]{2}"
    ),
    # The same where guesses run into the end.
    "drafts-to-nowhere": (
        "speculative_algorithm=ngram speculative_ngram_min=1 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=20 new=12 regex=[a-c]{6} dead_end=True; "
        "1 start b prompt=20 seed=1 new=8; 2 start c prompt=20 seed=2 new=12 regex=[a-a]{9} dead_end=True"
    ),
}  # fmt: skip
