"""The sampled tokens and requested logprobs of one microbatch, as tensors on the device.

Computed without waiting for the device; converted to numbers once they are on the host, which then finishes the
launched microbatch. Chooses nothing itself.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine.core.messages import TokenLogprob
from engine.core.plan import Microbatch, SamplingSpec, Segment
from engine.model.batch import DecodeBatch, ForwardBatch
from engine.model.transfer import Fetch, sent

# A token for each emitting segment, and its logprobs, None if its request wants none; () if no request does.
Sampled = tuple[tuple[int, ...], tuple[TokenLogprob | None, ...]]


class Choice:
    """The ``ids`` [rows] sampled from the logits ``raw`` [rows, vocabulary]. ``tensors`` is the part for the host.

    Each tensor covers all rows, because every copy from a GPU costs a call and perhaps a wait.
    """

    def __init__(self, ids: torch.Tensor, raw: torch.Tensor, specs: Sequence[SamplingSpec]) -> None:
        self.ids = ids
        self._rows = len(specs)
        self.tensors = [ids] if specs else []
        self._asked = [row for row, spec in enumerate(specs) if spec.return_logprob]
        # The rows that want each number of top tokens.
        self._lines: dict[int, list[int]] = {}
        if self._asked:
            self._score(raw, specs)

    def _score(self, raw: torch.Tensor, specs: Sequence[SamplingSpec]) -> None:
        # Only rows that want logprobs pay for the softmax.
        logprobs = torch.log_softmax(rows_of(raw, self._asked), dim=-1)
        said = logprobs.gather(-1, rows_of(self.ids, self._asked)[:, None])[:, 0]
        self.tensors.append(said)
        for line, row in enumerate(self._asked):
            top = min(max(0, specs[row].top_logprobs_num), logprobs.shape[-1])
            if top:
                self._lines.setdefault(top, []).append(line)
        # One topk for each number, so that the choice between equal tokens does not depend on other rows.
        for top, lines in self._lines.items():
            best = torch.topk(rows_of(logprobs, lines), top)
            self.tensors += [best.indices, best.values]

    def to_numbers(self, values: Sequence[torch.Tensor]) -> Sampled:
        """Convert the choice to numbers, from ``tensors`` or their copies on the host. Waits for the device."""
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
                # A token that the grammar forbids has a logprob of minus infinity, which JSON cannot express.
                pairs = [pair for pair in zip(tokens, logprobs, strict=True) if pair[1] > float("-inf")]
                found[self._asked[line]] = TokenLogprob(said[line], tuple(pairs))
        return ids, tuple(found)


class LaunchedStep:
    """A microbatch that was launched on the device, or the ``failure`` that the launch raised."""

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
        """Return the batch with the ids of ``segments``, some of which were unknown to the host at the launch."""
        batch = self._batch
        assert batch is not None, f"microbatch {self.microbatch.id} was not launched"
        if segments is not self.microbatch.segments:
            batch.segments = segments
            batch.token_ids_array[:] = [token for segment in segments for token in segment.token_ids]
        return batch

    def sampled(self) -> Sampled:
        """Wait for the device and return the tokens and logprobs."""
        assert self._choice is not None, f"microbatch {self.microbatch.id} was not launched"
        assert self._fetch is not None, f"microbatch {self.microbatch.id} was not launched"
        return self._choice.to_numbers(self._fetch.wait())


def rows_of(values: torch.Tensor, rows: Sequence[int]) -> torch.Tensor:
    """Select rows of a tensor, in order. Returns the tensor itself for all rows."""
    if len(rows) == len(values):
        return values
    return values.index_select(0, sent([np.array(rows, np.int64)], values.device)[0])
