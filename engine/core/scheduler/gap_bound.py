"""The gap bound: how many prompt tokens a step may compute beside running requests, so that no stream waits too long.

Learned from the times of the steps themselves: the scheduler is told the time of each step, so a recording replays it.
"""

from __future__ import annotations

from typing import Final

from engine.core.checkpoint import Checkpoint, CheckpointParts
from engine.core.plan import MIXED, PREFILL
from engine.core.scheduler.books import Launched
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature

# The weight of a new measurement in the moving average.
NEWEST_SHARE: Final = 0.25
_WITH_PROMPTS: Final = frozenset((PREFILL, MIXED))


class GapBound(Feature):
    """Keeps the time of a microbatch with prompts near ``max_gap_s`` while requests run.

    ``seconds_per_token`` is the measured time per token of such a microbatch, 0 before the first measurement. Only
    microbatches with at least half of the allowed tokens are measured: in a small one the fixed cost dominates.
    """

    def __init__(self, core: Core) -> None:
        limits = core.limits
        self._core = core
        self._max_gap_s = limits.max_gap_s
        self._page_size = limits.page_size
        self._budget = limits.prefill_budget_tokens
        # When the last microbatch came back, in seconds.
        self._landed = 0.0
        self.seconds_per_token = 0.0
        self.is_on = limits.max_gap_s is not None

    @property
    def _allowed(self) -> int:
        """The most tokens of a microbatch, decodes included, within the longest wait of a stream."""
        if self._max_gap_s is None or not self.seconds_per_token:
            return self._budget
        return min(self._budget, int(self._max_gap_s / self.seconds_per_token))

    def bound_prompts(self, room: int, decodes: int) -> int:
        """Return what fits beside this many decodes: whole pages, and at least one, so that prompts advance."""
        tokens = self._allowed - decodes
        return min(room, max(self._page_size, tokens - tokens % self._page_size))

    def land(self, launched: Launched, *, failed: bool) -> None:
        """Measure a microbatch with prompts: from its launch, or from the end of the microbatch before it."""
        now = self._core.now
        seconds, self._landed = now - max(launched.time, self._landed), now
        if failed or launched.microbatch.mode not in _WITH_PROMPTS:
            return
        tokens = sum([len(segment.token_ids) for segment in launched.microbatch.segments])
        if 2 * tokens < self._allowed:
            return
        measured = seconds / tokens
        if self.seconds_per_token:
            measured = NEWEST_SHARE * measured + (1 - NEWEST_SHARE) * self.seconds_per_token
        self.seconds_per_token = measured

    def snapshot(self, parts: CheckpointParts) -> None:
        parts["seconds_per_token"] = self.seconds_per_token

    def restore(self, checkpoint: Checkpoint) -> None:
        self.seconds_per_token = checkpoint.seconds_per_token
