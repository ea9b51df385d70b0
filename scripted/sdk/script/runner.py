"""One run of one script on one adapter of the SDK, and how it ended.

A failure is what the script raised, a broken promise, or what the scheduler raised in a step. Any other exception is a
defect of the adapter or of the harness, and is raised as that.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

from scripted.core.account import OWN_ENDS
from scripted.core.phrases import text_of
from scripted.core.protocol import Adapter
from scripted.core.refusals import HarnessError
from scripted.core.run import Phase
from scripted.core.violation import Violation, is_raised_in
from scripted.errors import Overdue
from scripted.report.failure import FailureKind, FailureReport, ScriptError, ScriptFailed, ScriptTimeout
from scripted.report.frames import Frame, definition_of, frames_of, position_of
from scripted.script.context import BaseContext
from scripted.script.deadline import Deadline
from scripted.script.execution import OneScript, ScriptExecution, ScriptOutcome
from scripted.script.interruptions import error_text
from scripted.script.options import ScriptOptions
from scripted.script.process_state import ProcessState
from scripted.script.source import code_of
from scripted.script.watchdog import watchdog
from scripted.sdk.script.run import SdkRun

_HARNESS: Final = Path(__file__).parents[2]


class _SdkScript(OneScript):
    """One script, with the report of how it failed, as it was then."""

    def __init__(self, script: ScriptExecution, mutant: str | None) -> None:
        super().__init__(script, None)
        self.report: FailureReport | None = None
        self._mutant = mutant

    def next_script(self) -> ScriptExecution | None:
        # The scheduler is made by now: what it sets for its whole process, as vLLM does when it is imported, stays.
        # In a live server a script runs beside the engine's main thread, whose process is not that of other tests.
        is_of_a_test = threading.current_thread() is threading.main_thread()
        if self.script.options.must_assert and is_of_a_test and self._next is not None:
            self._state = ProcessState()
        return super().next_script()

    def failed(self, run: SdkRun, script: ScriptExecution, exc: Exception) -> None:
        super().failed(run, script, exc)
        _check_blame(run, exc)
        self.report = _report(run, script, exc, self._mutant)

    def crashed(self, run: SdkRun, script: ScriptExecution, exc: BaseException) -> None:
        super().crashed(run, script, exc)
        if not isinstance(exc, HarnessError):
            _check_blame(run, exc)
            self.report = _report(run, script, exc, self._mutant)


def run_script(
    adapter: Adapter,
    script: Any,
    arguments: Mapping[str, Any],
    *,
    config: Any,
    options: ScriptOptions,
    mutant: str | None,
    run_type: type[SdkRun] = SdkRun,
    parts: tuple[Any, Any, Any] | None = None,
) -> ScriptOutcome:
    """Run a generator function of ``t``, on ``parts`` if any. Raises ScriptFailed, ScriptTimeout or HarnessError."""
    execution = ScriptExecution(script, (), arguments, options)
    with ExitStack() as stack:
        stack.enter_context(adapter.switched_on(mutant))
        stack.enter_context(watchdog(options.timeout_s))
        execution.deadline = stack.enter_context(Deadline(options.timeout_s))
        source = _SdkScript(execution, mutant)
        run = run_type(config, adapter.name, source, parts=parts)
        try:
            adapter.drive(run)
        except Exception:
            if source.report is None:
                raise
    if source.report is not None:
        raise _error_of(source, source.report) from source.error
    return ScriptOutcome(
        steps=execution.steps,
        compared=sum(life.end in OWN_ENDS for life in run.oracle.account.lives),
        reached=execution.reached,
        loose_ends=execution.loose_ends,
        log=adapter.as_log(run.records, config) if options.record else None,
        notes=execution.notes if options.record else (),
        asked=execution.asked,
    )


def _error_of(source: _SdkScript, report: FailureReport) -> ScriptError:
    return (ScriptTimeout if isinstance(source.error, Overdue) else ScriptFailed)(report)


def _check_blame(run: SdkRun, exc: BaseException) -> None:
    """Raise HarnessError for what neither the script nor the scheduler is to blame for."""
    meant = exc is run.script_error or isinstance(exc, (Violation, Overdue, *run.adapter.violations))
    if not meant and run.phase is not Phase.ADAPTER and not is_raised_in(exc, run.adapter.packages):
        raise HarnessError(
            f"{run.phase.value} {run.step} failed with {type(exc).__name__}: {text_of(exc)}; this says nothing "
            "about the scheduler, and is a defect of the adapter or of the harness"
        ) from exc


def _report(run: SdkRun, script: ScriptExecution, exc: BaseException, mutant: str | None) -> FailureReport:
    """What pytest shows."""
    code = code_of(script.function)
    frames = frames_of(exc, inside=code.co_filename) or position_of(script.script) or definition_of(code)
    words = run.adapter.config_words(run.config)
    context = BaseContext if script.context is None else type(script.context)
    kind = FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.FAILED
    return FailureReport(
        kind=kind,
        error=error_text(exc, context, script.function),
        when=_when(run, script, exc),
        frames=frames,
        inside=_frames_inside(exc) if run.phase is Phase.ADAPTER and run.script_error is None else (),
        script=f"{code.co_filename}::{script.function.__name__}",
        adapter=run.adapter.name,
        tier=run.tier,
        config=", ".join(f"{name}={value}" for name, value in words.items()) or "the default configuration",
        log=run.adapter.as_log(run.records, run.config),
        notes=script.notes,
        state=_counts(run),
        mutant=mutant,
        replay=script.options.replay,
    )


def _when(run: SdkRun, script: ScriptExecution, exc: BaseException) -> str:
    if exc is run.script_error:
        return ""
    after = ", after the end of the script" if script.steps and run.step > script.steps else ""
    if isinstance(exc, Violation):
        return f"The scheduler broke a promise in step {run.step}{after}."
    if run.phase is Phase.ADAPTER:
        return f"The scheduler raised this in step {run.step}{after}."
    return ""


def _frames_inside(exc: BaseException) -> tuple[Frame, ...]:
    """The lines of the adapter, below those of the harness."""
    frames = [one for one in extract_tb(exc.__traceback__) if not Path(one.filename).is_relative_to(_HARNESS)]
    return tuple(Frame(one.filename, one.lineno or 0, one.name, one.line or "") for one in frames)


def _counts(run: SdkRun) -> str:
    try:
        return f"step {run.step}: {run.adapter.what_is_busy(run)}"
    except Exception as exc:  # noqa: BLE001 - a report on a broken scheduler must come out all the same
        return f"not readable ({exc})"
