"""The simulated model: fingerprints of tokens, and what follows from one: a token, its logprobs.

Pure functions, equal in every process. A fingerprint stands for all tokens up to a position, as KV does, so what the
model says depends on what was really read. It keeps no KV and knows no pages.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Sequence
from typing import Final

from engine.limits import Limits
from engine.messages import PromptLogprob, TokenLogprob
from engine.plan import SamplingSpec, Segment

__all__ = [
    "CHAIN",
    "FIRST_TOKEN",
    "MASK",
    "START",
    "alphabet_of",
    "choose",
    "has_penalty",
    "links_of",
    "logprob_of",
    "prompt_logprobs_of",
    "salt_of",
]

# Fingerprints have 30 bits, one digit of Python's integers: a link of the chain costs 60 % of one with 64 bits.
MASK: Final = 2**30 - 1
# Multipliers of the PCG (32 bits) and SplitMix64 generators; any odd ones would do.
CHAIN: Final = 747_796_405
_MIX: Final = 0xBF58476D1CE4E5B9
# The fingerprint before the first token.
START: Final = 0x1E3779B9
# Tokens are printable ASCII, so that their text is one character each and no special token is ever emitted.
FIRST_TOKEN: Final = 33
_TOKENS: Final = 94
# What is looked up in a text is only right where there is little to say.
_TOKENS_BESIDE_DRAFTS: Final = 3
# A chain over fewer tokens than this is made faster than it is found again.
_PROMPT_TOKENS: Final = 16
_PROMPTS_KEPT: Final = 1024
# The bounds of a bias: next to it no model's own preference counts.
_DECISIVE_BIAS: Final = 100


def alphabet_of(limits: Limits) -> int:
    """How many different tokens the simulated model of an engine with these limits says."""
    looks_up = limits.draft_tokens and not limits.has_draft_model
    return _TOKENS_BESIDE_DRAFTS if looks_up else _TOKENS


def links_of(fingerprint: int, tokens: Sequence[int]) -> list[int]:
    """The fingerprint, and the one after each token. Not to be changed: some are handed out again."""
    return (_chain if len(tokens) < _PROMPT_TOKENS else _chain_of_prompt)(fingerprint, tokens)


def _chain(fingerprint: int, tokens: Sequence[int]) -> list[int]:
    # Half the price of a function call a token, and the tokens of prompts are most of what a simulated step costs.
    return [fingerprint, *[fingerprint := (fingerprint * CHAIN + token + 1) & MASK for token in tokens]]


# The runs of a search begin alike: most of their prompts have been computed before.
_chain_of_prompt: Final = functools.lru_cache(maxsize=_PROMPTS_KEPT)(_chain)


def salt_of(*values: object) -> int:
    """A number that stands for these values, equal in every process."""
    return zlib.crc32(repr(values).encode()) & MASK


def has_penalty(spec: SamplingSpec) -> bool:
    """Whether a token depends on what the request has said before."""
    return spec.repetition_penalty != 1.0 or spec.frequency_penalty != 0.0 or spec.presence_penalty != 0.0


def choose(value: int, position: int, spec: SamplingSpec, alphabet: int, allowed: tuple[int, ...] | None = None) -> int:
    """The token at ``position``: from ``value`` alone if greedy, else from the seed and the position as well.

    A token whose bias is the largest there can be is always said, one with the smallest never; of what a grammar allows
    one is said in any case.
    """
    if spec.temperature != 0:
        value ^= (spec.seed + position) * CHAIN & MASK
    never: tuple[int, ...] = spec.suppressed_ids if position < spec.suppressed_until else ()
    if spec.logit_bias:
        value ^= salt_of(spec.logit_bias)
        never += tuple(token for token, bias in spec.logit_bias if bias <= -_DECISIVE_BIAS)
        always = [token for token, bias in spec.logit_bias if bias >= _DECISIVE_BIAS and token not in never]
        if allowed is not None:
            always = [token for token in always if token in allowed]
        if always:
            return always[0]
    if allowed is not None:
        tokens = [token for token in allowed if token not in never] or allowed
        return tokens[(value * _MIX >> 40) % len(tokens)]
    token = FIRST_TOKEN + (value * _MIX >> 40) % alphabet
    if token not in never:
        return token
    others = (FIRST_TOKEN + (token + step - FIRST_TOKEN) % alphabet for step in range(1, alphabet))
    return next((other for other in others if other not in never), token)


def prompt_logprobs_of(segment: Segment, links: list[int], spec: SamplingSpec) -> tuple[PromptLogprob, ...]:
    """Made up as well, of the KV up to the position before a token and of the token: one out of place shows."""
    first, values = segment.logprobs_from, []
    for position, target in enumerate(segment.targets, first):
        number = (links[position - segment.start + 1] ^ (target + 1) * CHAIN) * _MIX >> 40 & 0xFFFF
        best = [(FIRST_TOKEN + (number + i) % _TOKENS, -i / 1000) for i in range(spec.prompt_top_logprobs_num)]
        values.append(PromptLogprob(-number / 1000, 1 + number, tuple(best)))
    return tuple(values)


def logprob_of(fingerprint: int, token: int, spec: SamplingSpec, alphabet: int) -> TokenLogprob:
    """A made-up but deterministic distribution: the chosen token first, then its neighbours."""
    first = -((fingerprint >> 10) % 1000) / 1000
    top = [(FIRST_TOKEN + (token - FIRST_TOKEN + i) % alphabet, first - i) for i in range(spec.top_logprobs_num)]
    return TokenLogprob(logprob=first, top=tuple(top))
