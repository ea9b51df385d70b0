"""A plan of vLLM's scheduler whose result is not back, with the masks that the workers apply to its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from scripted.sdk import Batch, Share
from scripted_vllm.grammar import MASKED, Masks, Sampler
from scripted_vllm.ids import rid_of


class PlanInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A plan without its result. A plan that computes nothing has no batch and no result.

    ``guesses`` are the drafts it was made with, ``masks`` the workers' masks.
    """

    plan: Any
    shares: tuple[Share, ...]
    guesses: Mapping[str, tuple[int, ...]]
    transferred: Any
    batch: Batch | None = None
    masks: Masks = {}

    def with_masks(self, sampler: Sampler) -> PlanInFlight:
        """Return the plan with the scheduler's current masks, with which the workers sample."""
        masks = sampler.masks_of(self.plan)
        return msgspec.structs.replace(self, masks=masks) if masks else self

    def masked_shares(self) -> tuple[Share, ...]:
        """Return the shares with those guesses replaced that the masks rule out."""
        return tuple([self._masked_share(share) for share in self.shares])

    def _masked_share(self, share: Share) -> Share:
        for name, (holding, _) in self.masks.items():
            if rid_of(name) == share.rid and holding < len(share.draft_ids):
                ids = (*share.draft_ids[:holding], *[MASKED] * (len(share.draft_ids) - holding))
                return msgspec.structs.replace(share, draft_ids=ids)
        return share
