"""Prompt logprobs on the last stage: turns the logits of a chunk of a prompt into a value for each following token.

Takes logits a few rows at a time, because they are in fp32 and large. Owns no request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import torch

from engine.core.messages import PromptLogprob
from engine.core.plan import SamplingSpec, Segment

# With a vocabulary of 150,000 tokens, 128 rows of logits are 77 MB in fp32.
SLICE_ROWS: Final = 128
# Replaces minus infinity, which JSON lacks, as the logprob of a token with probability 0.
_LEAST_LOGPROB: Final = -9999.0

# A function that takes the logits [rows, vocabulary] of the next requested rows.
ScoreTaker = Callable[[torch.Tensor], None]


def scored_rows(segments: Sequence[Segment]) -> list[int]:
    """Return the indices, in a microbatch, of the tokens whose logits give prompt logprobs, in order."""
    rows: list[int] = []
    first = 0
    for segment in segments:
        if segment.logprobs_from >= 0:
            start = first + segment.logprobs_from - segment.start
            rows += range(start, start + len(segment.targets))
        first += len(segment.token_ids)
    return rows


def slices_of(rows: list[int]) -> Iterator[list[int]]:
    for start in range(0, len(rows), SLICE_ROWS):
        yield rows[start : start + SLICE_ROWS]


class PromptScores:
    """The prompt logprobs of one microbatch. ``spec_of`` returns the number of top tokens that a segment wants."""

    def __init__(self, segments: Sequence[Segment], spec_of: Callable[[Segment], SamplingSpec]) -> None:
        asked = [segment for segment in segments if segment.logprobs_from >= 0]
        self._counts = [len(segment.targets) for segment in asked]
        self._targets = [target for segment in asked for target in segment.targets]
        self._tops = [
            spec_of(segment).prompt_top_logprobs_num
            for segment, count in zip(asked, self._counts, strict=True)
            for _ in range(count)
        ]
        self._values: list[PromptLogprob] = []

    def take(self, logits: torch.Tensor) -> None:
        """Take the logits of the next rows, in order."""
        done, count = len(self._values), len(logits)
        targets, tops = self._targets[done : done + count], self._tops[done : done + count]
        logprobs = torch.log_softmax(logits.float(), dim=-1).clamp_(min=_LEAST_LOGPROB)
        said = logprobs.gather(-1, torch.tensor(targets, device=logprobs.device)[:, None])
        ranks = ((logprobs > said).sum(dim=-1) + 1).tolist()
        best = torch.topk(logprobs, min(max(tops), logprobs.shape[-1]))
        rows = zip(said[:, 0].tolist(), ranks, tops, best.indices.tolist(), best.values.tolist(), strict=True)
        self._values += [
            PromptLogprob(logprob, rank, tuple(zip(ids[:top], values[:top], strict=True)))
            for logprob, rank, top, ids, values in rows
        ]

    def parts(self) -> tuple[tuple[PromptLogprob, ...], ...]:
        """Return the values of each requesting segment, in order."""
        values = iter(self._values)
        return tuple(tuple(next(values) for _ in range(count)) for count in self._counts)
