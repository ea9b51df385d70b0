"""What was chosen for one microbatch: tokens and the logprobs that were asked for, as tensors of the device.

Computed there without waiting for it; told to the host as numbers once they have come: then the host is to do the rest
of a microbatch that was launched. Chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.core.messages import TokenLogprob
from engine.core.plan import Microbatch, SamplingSpec, Segment
from engine.model.batch import DecodeBatch, ForwardBatch
from engine.model.transfer import Fetch, sent

# A token for each segment that chooses one; logprobs, None for those whose request asked for none, or nothing at all.
Sampled = tuple[tuple[int, ...], tuple[TokenLogprob | None, ...]]


class Choice:
    """``ids`` [rows] were chosen from ``raw`` [rows, vocabulary]. ``tensors`` is all that the host needs of it.

    What leaves a GPU leaves it for all rows at once: each tensor is a copy, and may be a wait.
    """

    def __init__(self, ids: torch.Tensor, raw: torch.Tensor, specs: Sequence[SamplingSpec]) -> None:
        self.ids = ids
        self._rows = len(specs)
        self.tensors = [ids] if specs else []
        self._asked = [row for row, spec in enumerate(specs) if spec.return_logprob]
        # The lines of the rows that ask for as many likely tokens, by that number.
        self._lines: dict[int, list[int]] = {}
        if self._asked:
            self._score(raw, specs)

    def _score(self, raw: torch.Tensor, specs: Sequence[SamplingSpec]) -> None:
        # Rows that asked for none pay for no softmax.
        logprobs = torch.log_softmax(rows_of(raw, self._asked), dim=-1)
        said = logprobs.gather(-1, rows_of(self.ids, self._asked)[:, None])[:, 0]
        self.tensors.append(said)
        for line, row in enumerate(self._asked):
            top = min(max(0, specs[row].top_logprobs_num), logprobs.shape[-1])
            if top:
                self._lines.setdefault(top, []).append(line)
        # Together: which of two equal tokens is told must not depend on other rows.
        for top, lines in self._lines.items():
            best = torch.topk(rows_of(logprobs, lines), top)
            self.tensors += [best.indices, best.values]

    def told(self, values: Sequence[torch.Tensor]) -> Sampled:
        """The choice in numbers, from ``tensors`` or from what has come of them. Waits for the device of these."""
        if not values:
            return (), ()
        ids = tuple(values[0].tolist())
        if not self._asked:
            return ids, ()
        said: list[float] = values[1].tolist()
        found: list[TokenLogprob | None] = [None] * self._rows
        for row, logprob in zip(self._asked, said, strict=True):
            found[row] = TokenLogprob(logprob)
        for number, lines in enumerate(self._lines.values(), start=1):
            indices, likely = values[2 * number : 2 * number + 2]
            for line, tokens, logprobs in zip(lines, indices.tolist(), likely.tolist(), strict=True):
                # What a grammar forbids has no probability, and minus infinity no JSON.
                pairs = [pair for pair in zip(tokens, logprobs, strict=True) if pair[1] > float("-inf")]
                found[self._asked[line]] = TokenLogprob(said[line], tuple(pairs))
        return ids, tuple(found)


class LaunchedStep:
    """``batch`` was handed to the device, and its tokens are on their way; or ``failure`` was raised meanwhile."""

    def __init__(self, microbatch: Microbatch) -> None:
        self.microbatch = microbatch
        self.failure: Exception | None = None
        self._batch: ForwardBatch | DecodeBatch | None = None
        self._choice: Choice | None = None
        self._fetch: Fetch | None = None

    def note(self, batch: ForwardBatch | DecodeBatch, choice: Choice, device: torch.device) -> None:
        self._batch, self._choice = batch, choice
        self._fetch = Fetch(choice.tensors, device)

    def learn(self, segments: Sequence[Segment]) -> ForwardBatch | DecodeBatch:
        """The batch with the ids of ``segments``, some of which the host did not know when it was launched."""
        batch = self._batch
        assert batch is not None, f"microbatch {self.microbatch.id} was not launched"
        if segments is not self.microbatch.segments:
            batch.segments = segments
            batch.token_ids_array[:] = [token for segment in segments for token in segment.token_ids]
        return batch

    def sampled(self) -> Sampled:
        """The tokens and logprobs. Waits for the device."""
        assert self._choice is not None, f"microbatch {self.microbatch.id} was not launched"
        assert self._fetch is not None, f"microbatch {self.microbatch.id} was not launched"
        return self._choice.told(self._fetch.wait())


def rows_of(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Some rows of a tensor, in order; itself where that is all of them."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, sent([np.array(rows, np.int64)], values.device)[0])
