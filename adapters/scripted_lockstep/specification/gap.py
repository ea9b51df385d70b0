"""Gaps of the executable specification: the bound on prompt tokens beside running requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.core.limits import Limits
from engine.core.plan import DECODE, MIXED, PREFILL, ForwardMode
from scripted_lockstep.specification.expected import ExpectedSegment

_NEWEST_SHARE: Final = 0.25


class SpecifiedGap:
    """**Gap**: the average time per token in microbatches with prompts, if they have half of the allowed size.

    With ``max_gap_steps`` also the average time and size of microbatches of decodes.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.is_bounded = limits.max_gap_s is not None or limits.max_gap_steps is not None
        self.launches: list[float] = []  # of the microbatches in flight
        self.landed = 0.0
        self.measured: list[float] = []  # seconds per token, oldest first
        self.decodes: list[tuple[float, int]] = []  # seconds and tokens, oldest first

    def allowed(self, decodes: int) -> int:
        """The most tokens of a microbatch, decodes included."""
        limits, token_s = self.limits, _average(self.measured)
        budget, alone_s = limits.prefill_budget_tokens, _average([seconds for seconds, _ in self.decodes])
        if token_s and limits.max_gap_s is not None:
            return min(budget, int(limits.max_gap_s / token_s))
        if token_s and alone_s and limits.max_gap_steps is not None:
            alone = alone_s / token_s + decodes - _average([tokens for _, tokens in self.decodes])
            return min(budget, int(max(limits.max_gap_steps * max(decodes, alone), 0.01 / token_s)))
        return budget // 4

    def beside(self, decodes: int) -> int:
        """The most prompt tokens: whole pages, at least one, and with ``max_gap_steps`` a quarter of the budget,
        but no more than 128 tokens.

        A microbatch of about 128 tokens or more has the nearest multiple of 64 instead.
        """
        page, limits = self.limits.page_size, self.limits
        least = 1 if limits.max_gap_steps is None else min(128, limits.prefill_budget_tokens // 4) // page
        tokens = max(1, least, (self.allowed(decodes) - decodes) // page) * page
        nearest = (tokens + decodes + 32) // 64 * 64
        return tokens if nearest < 128 else max(page, nearest - decodes)

    def launch(self, now: float) -> None:
        """Note a microbatch in flight."""
        if self.is_bounded:
            self.launches.append(now)

    def land(self, now: float, mode: ForwardMode, segments: Sequence[ExpectedSegment], *, failed: bool) -> None:
        """Take the oldest microbatch out of flight, and measure it."""
        if not self.is_bounded:
            return
        since, self.landed = max(self.launches.pop(0), self.landed), now
        tokens = sum([len(segment.token_ids) for segment in segments])
        if failed:
            return
        if mode is DECODE and (self.decodes or now > since):
            self.decodes.append((now - since, tokens))
        decodes = len([one for one in segments if one.emits and len(one.token_ids) == 1])
        if mode in (PREFILL, MIXED) and 2 * tokens >= self.allowed(decodes):
            self.measured.append((now - since) / tokens)


def _average(values: Sequence[float]) -> float:
    """Return a moving average: the newest value has a weight of a quarter, the first one counts in full."""
    average = 0.0
    for value in values:
        average = _NEWEST_SHARE * value + (1 - _NEWEST_SHARE) * average if average else value
    return average
