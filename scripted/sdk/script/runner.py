"""One run of one script on one adapter of the SDK: a machine as good as new, the script, the end of every schedule.

A failure is what the script raised, a broken promise, or what the scheduler raised in a step. Any other exception is a
defect of the adapter or of the harness, and is raised as that.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import suppress
from pathlib import Path
from traceback import extract_tb
from typing import Any, Final

import msgspec

from scripted.adapters.lockstep.sim.watchdog import watchdog
from scripted.core.phrases import text_of
from scripted.core.protocol import Adapter
from scripted.core.refusals import HarnessError
from scripted.core.run import Phase
from scripted.core.violation import Violation
from scripted.errors import BadCall, BudgetSpent, Overdue, ScriptError, ScriptFailed, ScriptTimeout
from scripted.gate.interruptions import error_text, no_departure
from scripted.report.failure import FailureKind, FailureReport
from scripted.report.frames import Frame, definition_of, frames_of, position_of
from scripted.script.options import ScriptOptions
from scripted.script.source import code_of
from scripted.script.wait import words_of_yielded
from scripted.script.windows import check_reached
from scripted.sdk.script.gate import ScriptGate
from scripted.sdk.script.t import AdapterContext

__all__ = ["AdapterScriptSucceeded", "run_script"]

_HARNESS: Final = Path(__file__).parents[2]
# What its client was told is what it is told alone.
_OWN_ENDS: Final = ("length", "stop")


class AdapterScriptSucceeded(msgspec.Struct, frozen=True, kw_only=True):
    """The script passed. ``steps`` are its own, without those that settled what it left open.

    ``compared`` outputs were equal to those of the same requests alone; ``reached`` counts the windows by name.
    """

    steps: int
    compared: int
    reached: dict[str, int]
    loose_ends: dict[str, int]

    def counts(self) -> dict[str, int]:
        """What the summary of many scripts adds up, by name."""
        return {"steps": self.steps, "compared": self.compared} | self.loose_ends


def run_script(
    adapter: Adapter,
    script: Any,
    arguments: Mapping[str, Any],
    *,
    config: Any,
    options: ScriptOptions,
    mutant: str | None,
) -> AdapterScriptSucceeded:
    """Run a generator function of ``t``. Raises ScriptFailed, ScriptTimeout or HarnessError."""
    with adapter.switched_on(mutant):
        run = _Run(script, arguments, options)
        gate = ScriptGate(config, adapter.name, run.go_on)
        try:
            with watchdog(options.timeout_s):
                adapter.drive(gate)
            run.check_windows(gate)
        except Exception as exc:
            run.check_blame(gate, exc)
            raise run.error_of(gate, exc, mutant) from exc
    return run.succeeded(gate)


class _Run:
    """A script on its way; its body starts with the first step."""

    def __init__(self, script: Any, arguments: Mapping[str, Any], options: ScriptOptions) -> None:
        self._function = script
        self._arguments = arguments
        self._options = options
        self._context: AdapterContext | None = None
        self._script: Generator[Any, None, Any] | None = None
        self._steps = 0
        self._loose_ends: dict[str, int] = {}

    def go_on(self, gate: ScriptGate) -> bool:
        """Let the script run to its next yield; False at its end."""
        if self._context is None:
            self._context = AdapterContext(gate, must_reach=self._options.must_reach)
            self._script = self._function(self._context, **self._arguments)
        else:
            self._context.note_step()
        goes_on, value = self._resume()
        if value is not None:
            raise BadCall(f"a script yields nothing, got {words_of_yielded(value)}")
        self._context.check_waits()
        if not goes_on:
            self._end(gate)
        elif gate.step == self._options.max_steps:
            self._stop()
        return goes_on

    def check_windows(self, gate: ScriptGate) -> None:
        """Raise AssertionError, as the script would, for windows that it has not seen."""
        assert self._context is not None
        try:
            check_reached(self._options.must_reach, self._context.reached)
        except AssertionError as exc:
            gate.script_error = exc
            raise

    def succeeded(self, gate: ScriptGate) -> AdapterScriptSucceeded:
        """What is told of a script that passed."""
        assert self._context is not None
        return AdapterScriptSucceeded(
            steps=self._steps,
            compared=sum(life.end in _OWN_ENDS for life in gate.oracle.account.lives),
            reached=dict(self._context.reached),
            loose_ends=self._loose_ends,
        )

    # -- one resumption --

    def _resume(self) -> tuple[bool, Any]:
        assert self._script is not None
        try:
            with no_departure():
                return True, next(self._script)
        except StopIteration:
            return False, None

    def _end(self, gate: ScriptGate) -> None:
        assert self._context is not None
        if not gate.step and self._options.must_step:
            raise BadCall("the script ended without a step, so nothing was tested; a yield lets one step run")
        self._steps = gate.step
        self._loose_ends = self._context.loose_ends()
        self._context.end()

    def _stop(self) -> None:
        """Raise at the script's line, so that it is shown; a script that catches it has failed as well."""
        assert self._context is not None
        assert self._script is not None
        why = self._context.obstacles() or "@scripted(..., max_steps=N) allows more"
        spent = BudgetSpent(
            f"the script ran its max_steps={self._options.max_steps} steps; {self._context.state}; {why}"
        )
        with suppress(StopIteration), no_departure():
            self._script.throw(spent)
        raise spent

    # -- what went wrong --

    def check_blame(self, gate: ScriptGate, exc: BaseException) -> None:
        """Raise HarnessError for what neither the script nor the scheduler is to blame for."""
        meant = exc is gate.script_error or isinstance(exc, (Violation, Overdue, *gate.adapter.violations))
        if not meant and gate.phase is not Phase.ADAPTER:
            raise HarnessError(
                f"{gate.phase.value} {gate.step} failed with {type(exc).__name__}: {text_of(exc)}; this says nothing "
                "about the scheduler, and is a defect of the adapter or of the harness"
            ) from exc

    def error_of(self, gate: ScriptGate, exc: BaseException, mutant: str | None) -> ScriptError:
        """The error that pytest shows."""
        code = code_of(self._function)
        frames = frames_of(exc, inside=code.co_filename) or position_of(self._script) or (definition_of(code),)
        words = gate.adapter.config_words(gate.config)
        kind = FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.FAILED
        report = FailureReport(
            kind=kind,
            error=error_text(exc, AdapterContext, self._function),
            when=self._when(gate, exc),
            frames=frames,
            inside=_frames_inside(exc) if gate.phase is Phase.ADAPTER and gate.script_error is None else (),
            script=f"{code.co_filename}::{self._function.__name__}",
            adapter=gate.adapter.name,
            config=", ".join(f"{name}={value}" for name, value in words.items()) or "the default configuration",
            log=gate.adapter.as_log(gate.records, gate.config),
            state=_counts(gate),
            mutant=mutant,
            replay=self._options.replay,
        )
        return (ScriptTimeout if isinstance(exc, Overdue) else ScriptFailed)(report)

    def _when(self, gate: ScriptGate, exc: BaseException) -> str:
        if exc is gate.script_error:
            return ""
        after = ", after the end of the script" if self._steps and gate.step > self._steps else ""
        if isinstance(exc, Violation):
            return f"The scheduler broke a promise in step {gate.step}{after}."
        if gate.phase is Phase.ADAPTER:
            return f"The scheduler raised this in step {gate.step}{after}."
        return ""


def _frames_inside(exc: BaseException) -> tuple[Frame, ...]:
    """The lines of the adapter, below those of the harness."""
    frames = [one for one in extract_tb(exc.__traceback__) if not Path(one.filename).is_relative_to(_HARNESS)]
    return tuple(Frame(one.filename, one.lineno or 0, one.name, one.line or "") for one in frames)


def _counts(gate: ScriptGate) -> str:
    try:
        return f"step {gate.step}: {gate.adapter.what_is_busy(gate)}"
    except Exception as exc:  # noqa: BLE001 - a report on a broken scheduler must come out all the same
        return f"not readable ({exc})"
