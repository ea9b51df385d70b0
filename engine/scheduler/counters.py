"""What the scheduler counts over its life: requests, tokens, forward passes. Counters only grow."""

from __future__ import annotations

from engine.messages import FinishReason

__all__ = ["Counters"]


class Counters:
    """Totals since the scheduler was made. ``forward_ct`` counts launched microbatches and names the next one."""

    __slots__ = (
        "cached_tokens",
        "forward_ct",
        "generated_tokens",
        "prompt_tokens",
        "requests_aborted",
        "requests_finished",
        "requests_refused",
        "requests_started",
        "retractions",
        "weights_version",
    )

    def __init__(self) -> None:
        self.forward_ct = 0
        self.requests_started = 0
        self.requests_finished = 0
        self.requests_aborted = 0
        self.requests_refused = 0
        self.retractions = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generated_tokens = 0
        self.weights_version = 0

    def count_end(self, reason: FinishReason) -> None:
        """Count a terminal reply: aborts apart from all other ends."""
        if reason is FinishReason.ABORT:
            self.requests_aborted += 1
        else:
            self.requests_finished += 1
