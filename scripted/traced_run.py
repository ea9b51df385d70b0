"""A recorded run: one script, run once by hand, with its records and its result.

What ``scripted run``, the gallery and the demo are made of. Starts no harness and prints nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import msgspec

from scripted.adapters.lockstep.configs import config_values
from scripted.adapters.lockstep.script.execution import ScriptSucceeded
from scripted.adapters.lockstep.step_words import log_of
from scripted.errors import ScriptError
from scripted.report.failure import FailureReport
from scripted.report.trace import Trace, TraceHeader
from scripted.script.decorator import ScriptedTest
from scripted.script.options import ScriptOptions

__all__ = ["Harness", "RecordedRun", "run_recorded"]

TierName = Literal["sim", "server"]


class Harness(Protocol):
    """A started ``ScriptedSim`` or ``ScriptedServer``."""

    def run(
        self, script: Any, *args: Any, timeout_s: float = ..., options: ScriptOptions | None = None, **kwargs: Any
    ) -> ScriptSucceeded: ...


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """How a run ended: a success or an error, never both. ``trace`` is None when no step was run."""

    success: ScriptSucceeded | None
    error: ScriptError | None
    trace: Trace | None
    seconds: float

    @property
    def passed(self) -> bool:
        """The script ended, and every check held."""
        return self.success is not None

    @property
    def steps(self) -> int:
        """Steps of the script that are known of."""
        return self.success.steps if self.success is not None else len(self.trace.log.steps) if self.trace else 0


def run_recorded(
    harness: Harness,
    test: ScriptedTest,
    *,
    title: str,
    tier: str,
    mutant: str | None = None,
    every_step: bool = True,
    arguments: dict[str, Any] | None = None,
    replay: str = "",
) -> RecordedRun:
    """Run a decorated script on a harness of its configuration and keep what happened; a ScriptError is kept too.

    ``mutant`` says what the harness was started with; ``every_step`` audits the engine's books after each step.
    """
    options = msgspec.structs.replace(test.options, record=True, check_every_step=every_step, replay=replay)
    header = _Header(title, cast(TierName, tier), test, mutant)
    started = time.perf_counter()
    try:
        success = harness.run(test.script, options=options, **(arguments or {}))
    except ScriptError as exc:
        return RecordedRun(success=None, error=exc, trace=header.failed(exc), seconds=time.perf_counter() - started)
    return RecordedRun(success=success, error=None, trace=header.passed(success), seconds=time.perf_counter() - started)


@dataclass(frozen=True)
class _Header:
    """What is known of a trace before the run ends."""

    title: str
    tier: TierName
    test: ScriptedTest
    mutant: str | None

    def passed(self, success: ScriptSucceeded) -> Trace | None:
        if success.limits is None:
            return None
        return Trace(self._header("passed", died=False), log_of(success.records, success.limits), success.notes)

    def failed(self, error: ScriptError) -> Trace | None:
        report = error.report
        assert isinstance(report, FailureReport), f"not a script of the engine: {report}"
        if report.log is None or not report.log.steps:
            return None
        died = report.log.steps[-1].error is not None
        return Trace(self._header(report.headline, died=died), report.log, report.notes)

    def _header(self, outcome: str, *, died: bool) -> TraceHeader:
        return TraceHeader(
            title=self.title,
            tier=self.tier,
            config=config_values(self.test.config),
            outcome=outcome,
            mutant=self.mutant,
            died=died,
        )
