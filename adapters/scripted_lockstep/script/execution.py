"""One run of one script on the engine, and how it ended: the outcome if it passed, else the report."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import msgspec

from engine.core.config import EngineConfig
from engine.core.errors import ProcessDiedError
from engine.core.limits import Limits
from engine.core.scheduler import StepRecord
from lockstep.errors import without_middle
from scripted.report.failure import SHOWN_STEPS, FailureKind, FailureReport
from scripted.report.step_log import FleetLog
from scripted.report.tally import NOT_COMPARED
from scripted.script.execution import ScriptExecution, ScriptOutcome
from scripted_lockstep.oracle.growth import Grown
from scripted_lockstep.script.solo_runs import Compared
from scripted_lockstep.step_words import call_names, log_of

# The minimum number of last steps in a report's data, which has more than its text.
REPORTED_STEPS = 64


def configs_of(script: Any, *others: EngineConfig) -> list[EngineConfig]:
    """Return these configurations and the ones that a script can reach by name, which other tests share."""
    return [*others, *(one for one in getattr(script, "__globals__", {}).values() if isinstance(one, EngineConfig))]


class ScriptSucceeded(ScriptOutcome, frozen=True, kw_only=True, tag=True):
    """The script passed.

    ``skipped`` outputs were not compared, by the reason. ``printed`` is output that was not shown yet. ``spent``: the
    script killed a stage, so the engine is not reused. ``records`` are present if the options request a record.
    """

    skipped: dict[str, int] = msgspec.field(default_factory=dict)
    printed: str = ""
    spent: bool = False
    records: tuple[StepRecord, ...] = ()

    def counts(self) -> dict[str, int]:
        return super().counts() | {f"{NOT_COMPARED}{reason}": count for reason, count in self.skipped.items()}


class EngineExecution(ScriptExecution):
    """A script on the engine. ``comparison`` is set at its very end."""

    comparison = Compared()
    _spent = False
    _digest = _plan_digest = ""
    _records: tuple[StepRecord, ...] = ()
    _kind: type | None = None
    _limits: Limits | None = None
    _limits_before: Limits | None = None
    _fleet: FleetLog | None = None

    def note_end(self, run: Any) -> None:
        """Note the engine's state at the script's end, before the harness continues with its own work."""
        self._spent = run.failure is not None or run.is_dead or self._has_changed_engine(run)
        self._digest, self._plan_digest = run.scheduler.digests.digest, run.scheduler.digests.plan_digest
        if self.options.record:
            self._records, self._limits = tuple(run.records), run.scheduler.limits
            self._fleet = None if run.fleet is None else run.fleet.log()

    def begin(self, context: Any) -> None:
        self._kind = type(context.scheduler)
        self._limits_before = copy.deepcopy(context.scheduler.limits)
        super().begin(context)

    def _has_changed_engine(self, run: Any) -> bool:
        """Return whether the script has changed initial settings of the engine, which no reset restores."""
        if self._limits_before is None:
            return False
        return run.scheduler.limits != self._limits_before or type(run.scheduler) is not self._kind

    def succeeded(self) -> ScriptSucceeded:
        return ScriptSucceeded(
            digest=self._digest,
            plan_digest=self._plan_digest,
            compared=self.comparison.outputs,
            skipped=self.comparison.skipped,
            printed=self.take_printed(),
            spent=self._spent,
            records=self._records,
            log=None if self._limits is None else log_of(self._records, self._limits),
            fleet=self._fleet,
            **self.outcome(),
        )

    def report(self, run: Any, exc: BaseException, kind: FailureKind, mutant: str | None, **more: Any) -> FailureReport:
        died = kind is FailureKind.DIED
        runs = [run] if run.fleet is None else [engine.run for engine in run.fleet.members]
        steps = max(REPORTED_STEPS, *(one.shown_steps(SHOWN_STEPS) for one in runs))
        kept = run.records if self.options.record else run.records[-steps:]
        more |= {
            "log": log_of(kept, run.scheduler.limits, call_names(run.records)),
            "fleet": None if run.fleet is None else run.fleet.log(None if self.options.record else steps),
            # A server that has lost a stage ends soon, so the next script must not use it.
            "spent": bool(run.is_dead or run.failure or isinstance(exc, Grown) or self._has_changed_engine(run)),
            "begun": self.context is not None,
        }
        if died and isinstance(exc, ProcessDiedError):
            more["dead_process"] = exc.process
        elif died:
            more |= {"dead_process": "scheduler", "cause": without_middle("".join(traceback.format_exception(exc)))}
        return super().report(run, exc, kind, mutant, **more)

    def state_text(self, run: Any) -> str:
        if self.context is None:
            return ""
        if run.fleet is not None:
            return "; ".join(f"{name}: {run.fleet[name].state}" for name in run.fleet.names)
        return str(self.context.state)
