"""A plan of vLLM's scheduler whose result is not back, with the masks that the workers apply to its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import msgspec

from scripted.core.masks import is_allowed
from scripted.sdk import Batch, Share
from scripted_vllm.grammar import masks_of
from scripted_vllm.ids import rid_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

# The token of a worker with a wrong mask: no grammar and no model has it.
_MASKED: Final = 0


class PlanInFlight(msgspec.Struct, frozen=True, kw_only=True):
    """A plan without its result. A plan that computes nothing has no batch and no result.

    ``guesses`` are the drafts it was made with, ``masks`` the workers' masks: see ``masks_of``.
    """

    plan: Any
    shares: tuple[Share, ...]
    guesses: Mapping[str, tuple[int, ...]]
    transferred: Any
    batch: Batch | None = None
    masks: Mapping[str, tuple[int, Sequence[int | None]]] = {}

    def with_masks(self, scheduler: Scheduler) -> PlanInFlight:
        """Return the plan with the scheduler's current masks, with which the workers sample."""
        masks = masks_of(self.plan, scheduler.get_grammar_bitmask(self.plan))
        return msgspec.structs.replace(self, masks=masks) if masks else self

    def masked_shares(self) -> tuple[Share, ...]:
        """Return the shares with those guesses replaced that the masks rule out."""
        return tuple([self._masked_share(share) for share in self.shares])

    def masked(self, tokens: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
        """Cut each request's tokens before the first that its mask forbids or does not cover."""
        return {name: _masked(said, self.masks.get(name)) for name, said in tokens.items()}

    def _masked_share(self, share: Share) -> Share:
        for name, (holding, _) in self.masks.items():
            if rid_of(name) == share.rid and holding < len(share.draft_ids):
                ids = (*share.draft_ids[:holding], *[_MASKED] * (len(share.draft_ids) - holding))
                return msgspec.structs.replace(share, draft_ids=ids)
        return share


def _masked(said: Sequence[int], mask: tuple[int, Sequence[int | None]] | None) -> Sequence[int]:
    if mask is None:
        return said
    holding, states = mask
    for place, (token, state) in enumerate(zip(said, states, strict=False)):
        if state is None or not is_allowed(token, state):
            return (*said[:place], _MASKED)
    return said[: holding + 1]
