"""The draft model: a smaller model on the last stage that guesses the next tokens of each request.

It computes what the plans compute, into KV of its own under the same page tables, so that it follows chunks, cached
prefixes and retractions without a plan of its own. It guesses greedily; the next decode verifies.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import torch

from engine.config import EngineConfig
from engine.limits import Limits
from engine.messages import Completion
from engine.model.backend import make_stage
from engine.model.host_pool import HostPool
from engine.plan import Microbatch, Segment


@dataclass(slots=True)
class _Guessing:
    """One request's guesses in the making: ``token`` goes to ``position``; there is room up to ``end``."""

    segment: Segment
    token: int
    position: int
    end: int
    guesses: tuple[int, ...] = ()


class DraftModel:
    """All layers of the configured draft model, on the device of the stage that it guesses for.

    Where the engine has a second tier, its KV has one too. ``never`` holds ids that are never sampled, so guessing them
    is vain. Raises CheckpointError when it cannot be loaded.
    """

    def __init__(self, config: EngineConfig, limits: Limits, *, never: Sequence[int], device: torch.device) -> None:
        # It guesses without LoRAs: what is said does not depend on it.
        alone = msgspec.structs.replace(limits, pp_size=1, window_tokens=0, window_pages=0, max_loras=0, loras=())
        placed = config.draft_config().model_copy(update={"device": str(device)})
        self._model = make_stage(placed, alone, 0)
        self._host = HostPool(self._model.pool, alone) if alone.host_pages else None
        self._never = torch.tensor(list(never), dtype=torch.int64, device=device)
        self._count = limits.draft_tokens
        self._page_size = limits.page_size

    def adopt(self, microbatch: Microbatch) -> None:
        """Bring the page tables up to date, also for a microbatch that is not computed."""
        for segment in microbatch.segments:
            self._model.pool.adopt(segment)

    def guess(self, microbatch: Microbatch, result: Completion) -> tuple[tuple[int, ...], ...]:
        """Compute the microbatch's KV, then guess on from its result: for each segment that emits, up to its room.

        A guess is computed in pages that the microbatch itself uses; they are its request's until the result is seen.
        """
        if microbatch.copies is not None and self._host is not None:
            self._host.carry_out(microbatch.copies, self._model.pool)
        self._model.forward(self._model.batch(microbatch.segments), None)
        every = list(self._begin(microbatch, result))
        for number in range(self._count):
            going = [one for one in every if len(one.guesses) == number and one.position < one.end]
            if not going:
                break
            segments = [
                Segment(one.segment.rid, one.segment.row, one.position, (one.token,), 0, (), emits=True)
                for one in going
            ]
            logits = self._model.forward(self._model.batch(segments), None)
            if len(self._never):
                logits = logits.index_fill(1, self._never, float("-inf"))
            for one, token in zip(going, torch.argmax(logits, dim=-1).tolist(), strict=True):
                one.guesses += (token,)
                one.token, one.position = token, one.position + 1
        return tuple([one.guesses for one in every])

    def _begin(self, microbatch: Microbatch, result: Completion) -> Iterator[_Guessing]:
        tokens, accepted, used = result.token_ids, iter(result.accepted), 0
        for segment in microbatch.segments:
            if not segment.emits:
                continue
            count = 1 + next(accepted) if segment.drafts else 1
            end = segment.start + len(segment.token_ids)
            room = -(-end // self._page_size) * self._page_size
            newest = tokens[used + count - 1]
            yield _Guessing(segment, newest, end - segment.drafts + count - 1, room)
            used += count
