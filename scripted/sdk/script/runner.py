"""Runs one script on one SDK adapter, and reports how it ended.

A script fails by its own exception, by a broken promise, or by an exception of the scheduler in a step. Any other
exception is a defect of the adapter or the harness, and is raised as a HarnessError.
"""

from __future__ import annotations

from collections.abc import Mapping
from traceback import extract_tb
from typing import Any

from scripted.core.account import OWN_ENDS
from scripted.core.base_adapter import config_text
from scripted.core.errors import Overdue
from scripted.core.installed import is_in_harness
from scripted.core.mutant import switched_on
from scripted.core.phrases import text_of
from scripted.core.protocol import Adapter, violations_of
from scripted.core.refusals import HarnessError
from scripted.core.run import Phase
from scripted.core.violation import Violation, is_raised_in
from scripted.report.failure import FailureKind, FailureReport
from scripted.report.frames import Frame
from scripted.report.step_log import log_of_adapter
from scripted.script.execution import OneScript, ScriptExecution, ScriptOutcome, run_one
from scripted.script.harness import ScriptedSim
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction
from scripted.sdk.script.run import SdkRun


class _SdkExecution(ScriptExecution[SdkRun]):
    """A script on an adapter's scheduler, which may be to blame for a failure."""

    def report(
        self, run: SdkRun, exc: BaseException, kind: FailureKind, mutant: str | None, **more: Any
    ) -> FailureReport:
        """Report a failure. Raises HarnessError if neither the script nor the scheduler is to blame."""
        _check_blame(run, exc)
        more |= {
            "when": _when(run, self, exc),
            "inside": _frames_inside(exc) if run.phase is Phase.ADAPTER and run.script_error is None else (),
            "log": log_of_adapter(run.adapter, run.records, run.config),
        }
        # The scheduler has no process of its own that could die.
        kind = FailureKind.FAILED if kind is FailureKind.DIED else kind
        return super().report(run, exc, kind, mutant, **more)

    def state_text(self, run: SdkRun) -> str:
        return f"step {run.step}: {run.adapter.what_is_busy(run)}"


class SdkSim(ScriptedSim[object, ScriptOutcome]):
    """Scripts on an adapter's machine: each gets a new one."""

    outcome_type = ScriptOutcome

    def __init__(self, adapter: Adapter, config: object, *, mutant: str | None = None) -> None:
        super().__init__(config, mutant=mutant)
        self._adapter = adapter

    def _run(
        self, script: ScriptFunction, args: tuple[object, ...], kwargs: dict[str, object], options: ScriptOptions
    ) -> ScriptOutcome:
        if not self.usable:
            raise HarnessError("this sim was shut down; start another one")
        return run_script(
            self._adapter, script, kwargs, args=args, config=self.config, options=options, mutant=self.mutant
        )

    def shutdown(self) -> None:
        self.usable = False


def run_script(
    adapter: Adapter,
    script: ScriptFunction,
    arguments: Mapping[str, object],
    *,
    args: tuple[object, ...] = (),
    config: object,
    options: ScriptOptions,
    mutant: str | None,
    run_type: type[SdkRun] = SdkRun,
    parts: tuple[Any, Any, Any] | None = None,
) -> ScriptOutcome:
    """Run a generator function that takes ``t``, on ``parts`` if given.

    Raises ScriptFailed, ScriptTimeout or HarnessError.
    """
    execution = _SdkExecution(script, args, arguments, options)
    execution.adapter, execution.config_text = adapter.name, config_text(adapter.config_words(config))
    source = OneScript(execution, mutant)
    runs: list[SdkRun] = []

    def drive(source: OneScript) -> None:
        runs.append(run_type(config, adapter.name, source, parts=parts))
        adapter.drive(runs[0])

    run_one(source, drive, switched_on(adapter, mutant))
    return ScriptOutcome(
        compared=sum(life.end in OWN_ENDS for life in runs[0].oracle.account.lives),
        log=log_of_adapter(adapter, runs[0].records, config) if options.record else None,
        **execution.outcome(),
    )


def _check_blame(run: SdkRun, exc: BaseException) -> None:
    """Raise HarnessError if neither the script nor the scheduler is to blame."""
    meant = exc is run.script_error or isinstance(exc, (Violation, Overdue, *violations_of(run.adapter)))
    if not meant and run.phase is not Phase.ADAPTER and not is_raised_in(exc, run.adapter.packages):
        raise HarnessError(
            f"{run.phase.value} {run.step} failed with {type(exc).__name__}: {text_of(exc)}; this says nothing "
            "about the scheduler, and is a defect of the adapter or of the harness"
        ) from exc


def _when(run: SdkRun, script: ScriptExecution, exc: BaseException) -> str:
    if exc is run.script_error:
        return ""
    # Set when the script ended; what is judged then may be its own last step.
    ended = "after" if run.step > script.steps else "at"
    after = f", {ended} the end of the script" if script.steps else ""
    if isinstance(exc, Violation):
        return f"The scheduler broke a promise in step {run.step}{after}."
    if run.phase is Phase.ADAPTER:
        return f"The scheduler raised this in step {run.step}{after}."
    return ""


def _frames_inside(exc: BaseException) -> tuple[Frame, ...]:
    """Return the adapter's lines of the traceback, without the harness's."""
    frames = [one for one in extract_tb(exc.__traceback__) if not is_in_harness(one.filename)]
    return tuple(Frame(one.filename, one.lineno or 0, one.name, one.line or "") for one in frames)
