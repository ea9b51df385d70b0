"""The answers to questions for the counters: each says what was true when it was asked.

Fed with questions and answers by the account of clients, which counts.
"""

from __future__ import annotations

from engine.messages import EngineStats
from scripted.core.violation import Violation

__all__ = ["StatsCalls"]


class StatsCalls:
    """``newest`` is the newest answer."""

    def __init__(self) -> None:
        self.newest: EngineStats | None = None
        self._asked: dict[str, dict[str, int]] = {}

    def ask(self, call_id: str, counts: dict[str, int]) -> None:
        """Note a question, and what its answer has to say."""
        self._asked[call_id] = counts

    def answered(self, call_id: str, stats: EngineStats) -> None:
        """Raise Violation for an answer to no question, or with another count."""
        counts = self._asked.pop(call_id, None)
        if counts is None:
            raise Violation(f"{call_id} is answered with counters, but no call is open")
        self.newest = stats
        for name, count in counts.items():
            if getattr(stats, name) != count:
                raise Violation(f"{name} is {getattr(stats, name)}, but the clients' count is {count}")
