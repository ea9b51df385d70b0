"""The embedding of each prompt, from the hidden states of its tokens: the output of an embedding model's last stage.

Means are summed chunk by chunk, by row. The scheduler computes every prompt from its first token, because a model whose
vectors are means shares no prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.core.messages import TokenLogprob
from engine.core.plan import Segment
from engine.model.pooling import Pooling, PoolingKind
from engine.model.sampler_output import Sampled


class PromptVectors:
    """The vectors of a stage's prompts, in fp32."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._sums: dict[int, torch.Tensor] = {}

    @torch.inference_mode()
    def take(self, states: torch.Tensor, segments: Sequence[Segment]) -> Sampled:
        """Return id 0 and the prompt's vector for each emitting segment, in place of a sampled token.

        ``states`` are the hidden states after the final norm: [emitting tokens, hidden size], or of all tokens if
        vectors are means.
        """
        vectors = self._means(states.float(), segments) if self._pooling.kind is PoolingKind.MEAN else states.float()
        if self._pooling.is_normalized:
            vectors = torch.nn.functional.normalize(vectors, dim=-1)
        rows = vectors.cpu().numpy()
        return (0,) * len(rows), tuple(TokenLogprob(0.0, (), row.tobytes()) for row in rows)

    def _means(self, states: torch.Tensor, segments: Sequence[Segment]) -> torch.Tensor:
        means, first = [states[:0]], 0
        for segment in segments:
            count = len(segment.token_ids)
            total = states[first : first + count].sum(dim=0)
            first += count
            # The sum is missing after a failed chunk, whose request has ended and must not fail the others.
            if segment.start and segment.row in self._sums:
                total = total + self._sums.pop(segment.row)
            if segment.emits:
                means.append((total / (segment.start + count))[None])
            else:
                self._sums[segment.row] = total
        return torch.cat(means)
