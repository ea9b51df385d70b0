"""The draft model: a smaller model on the last stage that guesses the next tokens of each request.

It follows the stages' plans, with its own KV under the same page tables, so that chunks, cached prefixes and
retractions need no extra plan. It guesses greedily; the next decode verifies. Guesses beyond a request's pages are
computed in pages of its pool that no plan names and nobody reads again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.config import EngineConfig
from engine.core.limits import Limits
from engine.core.messages import Completion
from engine.core.plan import Microbatch, Segment
from engine.model.backend import make_stage
from engine.model.host_pool import HostPool
from engine.model.sampling import Sampler


@dataclass(slots=True)
class _Guessing:
    """A request that is being guessed for: ``token`` goes to ``position``."""

    segment: Segment
    token: int
    position: int
    guesses: tuple[int, ...] = ()


class DraftModel:
    """All layers of the configured draft model, on the device of the stage that it guesses for.

    If the engine has a host tier, the draft model's KV has one too. ``never`` holds ids that are never sampled, and so
    never guessed. Raises CheckpointError if it cannot be loaded.
    """

    def __init__(self, config: EngineConfig, limits: Limits, *, never: Sequence[int], device: torch.device) -> None:
        # It guesses without LoRAs, because the output does not depend on its guesses.
        alone = msgspec.structs.replace(limits, pp_size=1, window_tokens=0, window_pages=0, max_loras=0, loras=())
        placed = config.draft_config().model_copy(update={"device": str(device)})
        with_scratch = msgspec.structs.replace(alone, total_pages=limits.total_pages + limits.draft_scratch_pages)
        self._model = make_stage(placed, with_scratch, 0)
        self._host = HostPool(self._model.pool, alone) if alone.host_pages else None
        self._sampler = Sampler(never=never, vocab_size=limits.vocab_size, device=device)
        self._limits = limits

    def adopt(self, microbatch: Microbatch) -> None:
        """Update the page tables, even for a microbatch that is not computed."""
        for segment in microbatch.segments:
            self._model.pool.adopt(segment)
            if segment.sampling is not None:
                self._sampler.adopt(msgspec.structs.replace(segment, sampling=segment.sampling.for_guesses))

    def forget(self) -> None:
        """Drop every row's sampling spec; only while no request owns a row."""
        self._sampler.forget()

    def guess(self, microbatch: Microbatch, result: Completion) -> tuple[tuple[int, ...], ...]:
        """Compute the microbatch's KV, then guess from its result for each segment that emits."""
        if microbatch.copies is not None and self._host is not None:
            self._host.carry_out(microbatch.copies, self._model.pool)
        self._model.forward(self._model.batch(microbatch.segments), None)
        every = list(self._begin(microbatch, result))
        for _ in range(self._limits.draft_tokens):
            going = [one for one in every if one.position < self._limits.context_length]
            if not going:
                break
            segments = [
                Segment(one.segment.rid, one.segment.row, one.position, (one.token,), 0, (), emits=True)
                for one in going
            ]
            logits = self._model.forward(self._model.batch(segments), None)
            tokens, _ = self._sampler.sample(logits, segments, _no_history)
            for one, token in zip(going, tokens, strict=True):
                one.guesses += (token,)
                one.token, one.position = token, one.position + 1
        return tuple([one.guesses for one in every])

    def _begin(self, microbatch: Microbatch, result: Completion) -> Iterator[_Guessing]:
        tokens, accepted, used, limits = result.token_ids, iter(result.accepted), 0, self._limits
        scratch = range(limits.total_pages, limits.total_pages + limits.draft_scratch_pages)
        each = limits.pages_for(limits.draft_tokens)
        for number, segment in enumerate([one for one in microbatch.segments if one.emits]):
            count = 1 + next(accepted) if segment.drafts else 1
            end = segment.start + len(segment.token_ids)
            position = end - segment.drafts + count - 1
            # The scratch pages go after the microbatch's pages; a later plan that adds pages there replaces them.
            place, stop = map(limits.pages_for, (end, min(position + limits.draft_tokens, limits.context_length)))
            pages = tuple(scratch[number * each :][: max(0, stop - place)])
            self._model.pool.adopt(Segment(segment.rid, segment.row, end, (), place, pages, emits=False))
            yield _Guessing(segment, tokens[used + count - 1], position)
            used += count


def _no_history(segment: Segment) -> NDArray[np.int32]:
    raise AssertionError(f"guesses for {segment.rid} must not depend on earlier tokens")
