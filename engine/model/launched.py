"""A microbatch that a stage has launched: what its device computes, and what the host is still to do with the result.

Waits for the device only when it is asked for the result.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.model.batch import DecodeBatch, ForwardBatch
from engine.model.choice import Choice, Sampled
from engine.model.transfer import Fetch
from engine.plan import Microbatch, Segment


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
