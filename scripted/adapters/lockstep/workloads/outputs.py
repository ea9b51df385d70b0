"""Base workloads of what requests say: stops, sampling, several choices, logprobs of prompts."""

# ruff: noqa: E501 - a schedule is one line.

from __future__ import annotations

from typing import Final

from scripted.adapters.lockstep.workloads.engines import PP1, PP4, SMALL

__all__ = ["OUTPUTS", "STOP_TOKENS"]

# What the prompt of 40 tokens and seed 0 says, token by token.
STOP_TOKENS: Final = (56, 84, 120, 91)

OUTPUTS: Final[dict[str, str]] = {
    # The second token of this prompt, at which it stops.
    "stops": f"{PP4}; 1 start a prompt=125 new=5 stop=92",
    # A draw depends on the seed, the position and the output so far, also after a retraction.
    "sampled": (
        f"{SMALL}; 1 start a prompt=13 new=10 temperature=0.8 draw=7 penalty=0.5; "
        "1 start b prompt=12 seed=1 new=10 temperature=1.0 draw=8 penalty=1.5; 3 start c prompt=9 seed=2 new=6 temperature=0.5 penalty=0.5"
    ),
    "sampled-otherwise": (
        f"{SMALL}; 1 start a prompt=13 new=10 temperature=0.8 draw=7 presence=0.5 min_p=0.25; "
        "1 start b prompt=12 seed=1 new=10 repetition=1.5 temperature=1.0; 3 start c prompt=9 seed=2 new=6 biased=65 bias=-100.0"
    ),
    # Ended by the token that ends a text: at once, not before there are three, not at all.
    "ends-of-text": (
        f"{PP1} pp_size=2; 1 start a prompt=40 new=6 biased=257 bias=100.0; 1 start b prompt=9 new=6 biased=257 bias=100.0 new_least=3; "
        "2 start c prompt=9 seed=1 new=3 biased=257 bias=100.0 ignore_eos=True; 3 start d prompt=9 seed=2 new=4 stop=257 biased=257 bias=100.0 ignore_eos=True"
    ),
    # One prompt, several answers.
    "choices": f"{PP1} pp_size=2; " + "; ".join(f"1 start n{i} prompt=40 new=4 temperature=1.0 draw={i}" for i in range(4)),
    # Prompt logprobs: of a split prompt, beside a cached prefix of it, and of a part of the prompt only.
    "scored": (
        f"{PP1} pp_size=2; 1 start a prompt=70 new=2 logprobs_from=0; 12 start b prompt=70 new=2 logprobs_from=0; "
        "13 start c prompt=70 new=2 logprobs_from=40; 14 start d prompt=100 new=2"
    ),
    # Chunks that end in the middle of a page, several in flight, beside decodes.
    "scored-mixed": (
        "pp_size=2 pp_async_depth=1 mixed_chunk=True chunked_prefill_size=24 max_total_tokens=512; 1 start a prompt=10 new=8; "
        "3 start b prompt=61 seed=1 new=2 logprobs_from=5; 4 start c prompt=61 seed=1 new=3 logprobs_from=30"
    ),
    # Sent back in the middle of the prompt, and while it decodes: nothing is told twice, and nothing is lost.
    "scored-and-paused": (
        "pp_size=2 chunked_prefill_size=16 max_total_tokens=256; 1 start a prompt=60 new=2 logprobs_from=3; 3 pause mode=retract; "
        "7 continue; 9 pause mode=retract; 12 continue"
    ),
    # Prompts in one microbatch, each with values of its own; one of them is gone when these are here.
    "scored-together": (
        "pp_size=2 chunked_prefill_size=32 max_total_tokens=256; 1 start a prompt=9 new=2 logprobs_from=2; "
        "1 start b prompt=12 seed=1 new=2 logprobs_from=0; 1 start c prompt=20 seed=2 new=0 logprobs_from=4; 2 abort a"
    ),
    "scored-without-pages": (
        "pp_size=2 page_size=4 chunked_prefill_size=16 max_total_tokens=44; 1 start a prompt=13 new=10 logprobs_from=0; "
        "1 start b prompt=12 seed=1 new=10 logprobs_from=4; 3 start c prompt=9 seed=2 new=6 logprobs_from=0"
    ),
    **{
        f"stops-at-{place}": f"{PP1} pp_size=2; 1 start a prompt=40 new=4 stop={token}; 2 start b prompt=20 seed=1 new=4"
        for place, token in enumerate(STOP_TOKENS, 1)
    },
}  # fmt: skip
