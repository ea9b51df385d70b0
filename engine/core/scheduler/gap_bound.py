"""The gap bound: limits the prompt tokens that a step computes beside running requests, so that no stream stalls.

Learned from the times of the steps alone, which are inputs of the scheduler, so a recording replays it.
"""

from __future__ import annotations

from typing import Final

from engine.core.checkpoint import Checkpoint, CheckpointParts
from engine.core.plan import DECODE, MIXED, PREFILL, Segment
from engine.core.scheduler.books import Launched
from engine.core.scheduler.core import Core
from engine.core.scheduler.feature import Feature

# The weight of a new measurement in a moving average.
NEWEST_SHARE: Final = 0.25
# Before steps are measured, prompts take this part of the budget beside decodes. With a bound in steps they may always
# take this part, but no more than these tokens.
LEAST_SHARE: Final = 4
LEAST_TOKENS: Final = 128
# Nobody notices a gap of this many seconds; with a bound in steps, prompts may always take as long.
LEAST_S: Final = 0.01
# Matrix products read the weights once for each block of this many rows, so one token over a multiple costs as much as
# a step of decodes: of M in bf16, 128 tokens take 313 ms and 129 take 362 (AVX-512). GPUs have tiles of this size too.
TILE_TOKENS: Final = 64
# With fewer blocks, the tokens that alignment leaves out cost more than the last block.
_ALIGNED_TILES: Final = 2
_MEASURED: Final = frozenset((PREFILL, MIXED, DECODE))


class GapBound(Feature):
    """Keeps the time of a microbatch with prompts near a bound while requests run.

    The bound is ``max_gap_s``, or ``max_gap_steps`` times the time of the decodes alone. ``seconds_per_token`` is the
    measured time per token of a microbatch with prompts; only microbatches with at least half of the allowed tokens are
    measured, because fixed costs dominate small ones. ``decode_seconds`` and ``decode_tokens`` are averages over the
    microbatches of decodes alone. All are 0 before the first measurement.
    """

    def __init__(self, core: Core) -> None:
        limits = core.limits
        self._core = core
        self._max_gap_s = limits.max_gap_s
        self._max_gap_steps = limits.max_gap_steps
        self._page_size = limits.page_size
        self._budget = limits.prefill_budget_tokens
        # A bound in steps is relative: with fewer tokens of a long prompt a step would mostly read the prefix again.
        steps_least = min(LEAST_TOKENS, self._budget // LEAST_SHARE) if limits.max_gap_steps is not None else 0
        self._least = max(1, steps_least // self._page_size) * self._page_size
        # The time at which the last microbatch came back, in seconds.
        self._landed = 0.0
        self.seconds_per_token = self.decode_seconds = self.decode_tokens = 0.0
        self.is_on = limits.max_gap_s is not None or limits.max_gap_steps is not None

    def _allowed(self, decodes: int) -> int:
        """Return the maximum tokens of a microbatch, decodes included, that respects the bound."""
        measured = self.seconds_per_token
        if self._max_gap_s is not None and measured:
            return min(self._budget, int(self._max_gap_s / measured))
        if self._max_gap_steps is None or not measured or not self.decode_seconds:
            return self._budget // LEAST_SHARE
        # The tokens of a microbatch with prompts that takes as long as these decodes alone, scaled from the average.
        alone = self.decode_seconds / measured + decodes - self.decode_tokens
        bounded = max(self._max_gap_steps * max(decodes, alone), LEAST_S / measured)
        return min(self._budget, int(bounded))

    def bound_prompts(self, room: int, decodes: int) -> int:
        """Return the prompt tokens beside this many decodes, and enough for prompts to advance.

        They are whole pages, or fill the microbatch to the nearest multiple of ``TILE_TOKENS``.
        """
        tokens = self._allowed(decodes) - decodes
        tokens = max(self._least, tokens - tokens % self._page_size)
        tiles = (tokens + decodes + TILE_TOKENS // 2) // TILE_TOKENS
        if tiles >= _ALIGNED_TILES:
            tokens = max(self._page_size, tiles * TILE_TOKENS - decodes)
        return min(room, tokens)

    def land(self, launched: Launched, *, failed: bool) -> None:
        """Measure a microbatch: from its launch, or from the end of the microbatch before it."""
        now = self._core.now
        seconds, self._landed = now - max(launched.time, self._landed), now
        microbatch = launched.microbatch
        if failed or microbatch.mode not in _MEASURED:
            return
        tokens = sum([len(segment.token_ids) for segment in microbatch.segments])
        if microbatch.mode is DECODE:
            self._measure_decodes(seconds, tokens)
            return
        if 2 * tokens < self._allowed(sum(map(_is_decode, microbatch.segments))):
            return
        measured = seconds / tokens
        if self.seconds_per_token:
            measured = NEWEST_SHARE * measured + (1 - NEWEST_SHARE) * self.seconds_per_token
        self.seconds_per_token = measured

    def _measure_decodes(self, seconds: float, tokens: float) -> None:
        if self.decode_seconds:
            seconds = NEWEST_SHARE * seconds + (1 - NEWEST_SHARE) * self.decode_seconds
            tokens = NEWEST_SHARE * tokens + (1 - NEWEST_SHARE) * self.decode_tokens
        self.decode_seconds, self.decode_tokens = seconds, tokens

    def snapshot(self, parts: CheckpointParts) -> None:
        parts["seconds_per_token"] = self.seconds_per_token
        parts["decode_seconds"], parts["decode_tokens"] = self.decode_seconds, self.decode_tokens

    def restore(self, checkpoint: Checkpoint) -> None:
        self.seconds_per_token = checkpoint.seconds_per_token
        self.decode_seconds, self.decode_tokens = checkpoint.decode_seconds, checkpoint.decode_tokens


def _is_decode(segment: Segment) -> bool:
    """Return whether a segment is a decode, or the last token of a prompt, which costs as much."""
    return segment.emits and len(segment.token_ids) == 1
