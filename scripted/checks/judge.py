"""The search's own checks inside a script: a schedule that broke a promise is asserted the same way by its test.

Reads each step back from the script's history, so it works in both tiers.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import TYPE_CHECKING, Final

from engine.scheduler import StepRecord, StepResult
from scripted.checks.clients import Ledger, Violation
from scripted.checks.promises import Promises
from scripted.checks.tokens_alone import check_tokens

if TYPE_CHECKING:
    from scripted.script.t import ScriptContext

__all__ = ["Judge"]

_SETTLING_LIMIT_STEPS: Final = 4_000


class Judge:
    """Steps of a script, each judged as the search judges them. Raises Violation where a promise is broken."""

    def __init__(self, t: ScriptContext) -> None:
        self._t = t
        self._ledger = Ledger(t.scheduler.limits)
        self._promises = Promises(t.scheduler)
        self._seen = 0
        self._flushable = True

    def steps(self, count: int) -> Generator[None, None, None]:
        """Run ``count`` steps."""
        for _ in range(count):
            yield
            self._judge()

    def until_settled(self) -> Generator[None, None, None]:
        """Run until every client was told how it ended and nothing is in flight."""
        for _ in range(_SETTLING_LIMIT_STEPS):
            # First a step: what was just sent is not in the ledger yet.
            yield from self.steps(1)
            if self._ledger.is_settled and not self._t.state.in_flight:
                self._ledger.check_end()
                self._check_tokens()
                self._promises.check_hits()
                self._promises.check_counters(self._ledger)
                return
        raise Violation(f"not settled after {_SETTLING_LIMIT_STEPS} steps: {self._t.state}")

    def _check_tokens(self) -> None:
        """Only where tokens come from fingerprints: a real model says something else."""
        if self._t._rig.world.tier == "sim":  # noqa: SLF001 - a script need not know its tier, its judge must
            for life in self._ledger.lives:
                check_tokens(life)

    def _judge(self) -> None:
        for record in self._t.history[self._seen :]:
            self._seen += 1
            result = _result_of(record)
            self._ledger.check(record.events, result, flushable=self._flushable)
            self._promises.check(result, missing=bool(record.in_flight))
            owned = record.running or record.pages_held or record.chunked is not None
            self._flushable = not (record.in_flight or owned)


def _result_of(record: StepRecord) -> StepResult:
    # A record does not keep ``again``; a scripted gate runs every step, so that nobody can have been overlooked.
    return StepResult(record.step, record.microbatch, record.replies, again=True, deadline=None)
