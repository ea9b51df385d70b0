"""Gaps of the executable specification: the bound on prompt tokens beside running requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.core.limits import Limits
from engine.core.plan import MIXED, PREFILL, ForwardMode
from scripted_lockstep.specification.expected import ExpectedSegment

_NEWEST_SHARE: Final = 0.25


class SpecifiedGap:
    """**Gap**: the average time of a token in microbatches with prompts; only those of half the allowed size count."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.launches: list[float] = []  # of the microbatches in flight
        self.landed = 0.0
        self.measured: list[float] = []  # seconds per token, oldest first

    @property
    def allowed(self) -> int:
        """Tokens of a microbatch, decodes included."""
        if self.limits.max_gap_s is None or not self.average:
            return self.limits.prefill_budget_tokens
        return min(self.limits.prefill_budget_tokens, int(self.limits.max_gap_s / self.average))

    @property
    def average(self) -> float:
        average = 0.0
        for seconds in self.measured:
            average = _NEWEST_SHARE * seconds + (1 - _NEWEST_SHARE) * average if average else seconds
        return average

    def beside(self, decodes: int) -> int:
        """The most prompt tokens: whole pages, at least one."""
        page = self.limits.page_size
        return max(1, (self.allowed - decodes) // page) * page

    def launch(self, now: float) -> None:
        """Note a microbatch in flight."""
        if self.limits.max_gap_s is not None:
            self.launches.append(now)

    def land(self, now: float, mode: ForwardMode, segments: Sequence[ExpectedSegment], *, failed: bool) -> None:
        """Take the oldest microbatch out of flight, and measure it."""
        if self.limits.max_gap_s is None:
            return
        since, self.landed = max(self.launches.pop(0), self.landed), now
        tokens = sum([len(segment.token_ids) for segment in segments])
        if mode in (PREFILL, MIXED) and not failed and 2 * tokens >= self.allowed:
            self.measured.append((now - since) / tokens)
