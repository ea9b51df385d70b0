"""The simulated model: the next token is a function of all tokens before it, through a fingerprint of their KV.

What a request says when nothing disturbs it follows from its prompt alone, without any scheduler.
"""

from __future__ import annotations

import functools
from typing import Final

__all__ = ["START", "guesses", "link", "next_token", "tokens_alone"]

# Fingerprints have 30 bits, one digit of Python's integers. The multipliers are those of the PCG and SplitMix64.
_MASK: Final = 2**30 - 1
_CHAIN: Final = 747_796_405
_MIX: Final = 0xBF58476D1CE4E5B9
START: Final = 0x1E3779B9
# Printable ASCII, as prompts are.
_FIRST_TOKEN: Final = 33
_TOKENS: Final = 94


def link(fingerprint: int, token: int) -> int:
    """The fingerprint of the KV up to and with this token."""
    return (fingerprint * _CHAIN + token + 1) & _MASK


def next_token(fingerprint: int) -> int:
    """What the model says after the tokens of this fingerprint."""
    return _FIRST_TOKEN + (fingerprint * _MIX >> 40) % _TOKENS


def guesses(fingerprint: int, count: int) -> tuple[int, ...]:
    """``count`` guesses at what comes next: the first few are right, how many depends on the fingerprint."""
    right, made = fingerprint % (count + 1), []
    for place in range(count):
        token = next_token(fingerprint)
        made.append(token if place < right else _FIRST_TOKEN + (token - _FIRST_TOKEN + 1) % _TOKENS)
        fingerprint = link(fingerprint, made[-1])
    return tuple(made)


@functools.lru_cache(maxsize=4096)
def tokens_alone(prompt: tuple[int, ...], max_new_tokens: int, stop_token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Every token of a request that nothing disturbs, the stop token included."""
    fingerprint = START
    said: list[int] = []
    for token in prompt:
        fingerprint = link(fingerprint, token)
    while len(said) < max_new_tokens:
        token = next_token(fingerprint)
        said.append(token)
        if token in stop_token_ids:
            break
        fingerprint = link(fingerprint, token)
    return tuple(said)
