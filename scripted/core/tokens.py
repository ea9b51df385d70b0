"""The model of every simulated device: a token is a function of the fingerprint of all tokens before it.

Pure functions, equal in every process. Like KV, a fingerprint stands for all tokens up to a position, so that an output
depends on the KV that was really read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Final

from scripted.core.masks import STATES, state_after

# Fingerprints have 30 bits, one digit of Python's integers: a link of the chain costs 60 % of one with 64 bits.
MASK: Final = 2**30 - 1
# Multipliers of the PCG (32 bits) and SplitMix64 generators; any odd numbers would do.
CHAIN: Final = 747_796_405
MIX: Final = 0xBF58476D1CE4E5B9
# The fingerprint before the first token.
START: Final = 0x1E3779B9
# Tokens are printable ASCII, so that their text is one character each and no special token is ever emitted.
FIRST_TOKEN: Final = 33
TOKENS: Final = 94
# A chain over fewer tokens than this is computed faster than it is looked up.
_PROMPT_TOKENS: Final = 16
_PROMPTS_KEPT: Final = 1024


def links_of(fingerprint: int, tokens: Sequence[int]) -> list[int]:
    """Return the fingerprint and the one after each token. Do not change the list: it may be a cached one."""
    return (_chain if len(tokens) < _PROMPT_TOKENS else _chain_of_prompt)(fingerprint, tokens)


def _chain(fingerprint: int, tokens: Sequence[int]) -> list[int]:
    # Inlined: half the cost of a function call per token, and prompt tokens are most of the cost of a simulated step.
    return [fingerprint, *[fingerprint := (fingerprint * CHAIN + token + 1) & MASK for token in tokens]]


# Runs of one search share prefixes: most of their prompts have been computed before.
_chain_of_prompt: Final = functools.lru_cache(maxsize=_PROMPTS_KEPT)(_chain)


def root_of(lora: int) -> int:
    """Return the fingerprint before the first token of a request, different for each LoRA."""
    return (START ^ lora * CHAIN) & MASK


def next_token(fingerprint: int, alphabet: int = TOKENS, state: int | None = None) -> int:
    """Sample the token that follows this fingerprint, masked by the grammar's state if there is one."""
    token = FIRST_TOKEN + (fingerprint * MIX >> 40) % alphabet
    if state is None:
        return token
    token += (state - token) % STATES
    return token if token < FIRST_TOKEN + TOKENS else token - STATES


def guesses(fingerprint: int, count: int, state: int | None = None) -> tuple[int, ...]:
    """Draft ``count`` tokens. The first few are right; the fingerprint determines how many.

    Some of the wrong ones are allowed by the grammar, and some are not.
    """
    right, made = fingerprint % (count + 1), []
    wrong = 1 if state is None or fingerprint & 1 else STATES
    for place in range(count):
        token = next_token(fingerprint, TOKENS, state)
        made.append(token if place < right else FIRST_TOKEN + (token - FIRST_TOKEN + wrong) % TOKENS)
        fingerprint = links_of(fingerprint, made[-1:])[-1]
        state = None if state is None else state_after(made[-1:], state)
    return tuple(made)


@functools.lru_cache(maxsize=4096)
def tokens_alone(
    prompt: tuple[int, ...],
    max_new_tokens: int,
    stop_token_ids: tuple[int, ...],
    lora: int = 0,
    *,
    masked: bool = False,
) -> tuple[int, ...]:
    """Generate the output of a request that runs alone, including the stop token."""
    fingerprint = links_of(root_of(lora), prompt)[-1]
    said: list[int] = []
    while len(said) < max_new_tokens:
        token = next_token(fingerprint, TOKENS, state_after(said) if masked else None)
        said.append(token)
        if token in stop_token_ids:
            break
        fingerprint = links_of(fingerprint, (token,))[-1]
    return tuple(said)
