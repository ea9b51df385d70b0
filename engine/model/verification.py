"""Verification of drafts: keeps the tokens of a forward pass that follow from certain tokens.

The token chosen at a position depends only on the tokens before it and on ``(seed, position)``. So the tokens equal the
result of decoding one by one, at any temperature: a guess is accepted with the probability that the model gives it, as
in rejection sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.core.messages import Completion, TokenLogprob
from engine.core.plan import Microbatch


def verify(
    microbatch: Microbatch,
    chosen: Sequence[int],
    logprobs: Sequence[TokenLogprob | None],
    dead_ends: Sequence[int] = (),
) -> Completion:
    """Build the result of a microbatch. ``chosen`` has the chosen token for each token whose logits choose one.

    ``logprobs`` is empty, or has one entry for each of these. At the places ``dead_ends`` nothing could be chosen: the
    draft before such a place is not accepted, so that the next decode of its request meets that end without a draft.
    """
    if not microbatch.drafts:
        return Completion(microbatch_id=microbatch.id, token_ids=tuple(chosen), logprobs=tuple(logprobs))
    tokens: list[int] = []
    kept: list[TokenLogprob | None] = []
    accepted: list[int] = []
    first = 0
    for segment in microbatch.segments:
        if not segment.emits:
            continue
        right = segment.accepted(chosen[first : first + segment.choosers])
        for place in dead_ends:
            if first < place < first + segment.choosers:
                right = min(right, place - first - 1)
        if segment.drafts:
            accepted.append(right)
        tokens += chosen[first : first + right + 1]
        kept += logprobs[first : first + right + 1]
        first += segment.choosers
    return Completion(
        microbatch_id=microbatch.id, token_ids=tuple(tokens), logprobs=tuple(kept), accepted=tuple(accepted)
    )
