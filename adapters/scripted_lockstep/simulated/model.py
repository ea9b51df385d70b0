"""Sampling of the simulated engine: from a fingerprint to a token and its logprobs.

Pure functions, equal in every process. A fingerprint covers all tokens up to a position, as KV does, so the output
depends on the KV that was really read. It keeps no KV and knows no pages.
"""

from __future__ import annotations

import zlib
from typing import Final

from engine.core.limits import Limits
from engine.core.messages import PromptLogprob, TokenLogprob
from engine.core.plan import SamplingSpec, Segment
from scripted.core.tokens import CHAIN, FIRST_TOKEN, MASK, MIX, TOKENS, next_token

# Prompt lookup guesses correctly only in texts of few different tokens.
_TOKENS_BESIDE_DRAFTS: Final = 3
# The bounds of a bias, which override the model's own preference.
_DECISIVE_BIAS: Final = 100


def alphabet_of(limits: Limits) -> int:
    """Return the number of different tokens that the simulated model of an engine with these limits emits."""
    looks_up = limits.draft_tokens and not limits.has_draft_model
    return _TOKENS_BESIDE_DRAFTS if looks_up else TOKENS


def salt_of(*values: object) -> int:
    """Hash these values. The hash is the same in every process."""
    return zlib.crc32(repr(values).encode()) & MASK


def choose(value: int, position: int, spec: SamplingSpec, alphabet: int, allowed: tuple[int, ...] | None = None) -> int:
    """Choose the token at ``position``: from ``value`` alone if greedy, else from the seed and the position as well.

    A token with the largest possible bias is always chosen, a token with the smallest never; where a grammar allows
    tokens, one of them is chosen in any case.
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
        return tokens[(value * MIX >> 40) % len(tokens)]
    token = next_token(value, alphabet)
    if token not in never:
        return token
    others = (FIRST_TOKEN + (token + step - FIRST_TOKEN) % alphabet for step in range(1, alphabet))
    return next((other for other in others if other not in never), token)


def prompt_logprobs_of(segment: Segment, links: list[int], spec: SamplingSpec) -> tuple[PromptLogprob, ...]:
    """Derive each prompt logprob from the token and the KV before it, so that a misplaced one is noticed."""
    first, values = segment.logprobs_from, []
    for position, target in enumerate(segment.targets, first):
        number = (links[position - segment.start + 1] ^ (target + 1) * CHAIN) * MIX >> 40 & 0xFFFF
        best = [(FIRST_TOKEN + (number + i) % TOKENS, -i / 1000) for i in range(spec.prompt_top_logprobs_num)]
        values.append(PromptLogprob(-number / 1000, 1 + number, tuple(best)))
    return tuple(values)


def logprob_of(fingerprint: int, token: int, spec: SamplingSpec, alphabet: int) -> TokenLogprob:
    """Derive a deterministic distribution: the chosen token first, then its neighbours."""
    first = -((fingerprint >> 10) % 1000) / 1000
    top = [(FIRST_TOKEN + (token - FIRST_TOKEN + i) % alphabet, first - i) for i in range(spec.top_logprobs_num)]
    return TokenLogprob(logprob=first, top=tuple(top))
