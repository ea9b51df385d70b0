"""One run of a script: its function, its arguments, how far it got; and where runs come from."""

from __future__ import annotations

import contextlib
import io
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any, NoReturn, Protocol

import msgspec

from engine.errors import ProcessDiedError
from engine.limits import Limits
from engine.scheduler import Scheduler, StepRecord
from scripted.adapters.lockstep.oracle.growth import Grown
from scripted.adapters.lockstep.oracle.tokens_alone import Compared
from scripted.adapters.lockstep.step_words import call_names, log_of
from scripted.errors import NotIdle, Overdue
from scripted.gate.interruptions import error_text, no_departure, without_debugger
from scripted.report.failure import FailureKind, FailureReport
from scripted.report.frames import definition_of, frames_of, position_of
from scripted.report.step_log import Note
from scripted.report.tally import NOT_COMPARED
from scripted.rig.rig import Rig
from scripted.script.decorator import ScriptFunction
from scripted.script.options import ScriptOptions
from scripted.script.source import code_of
from scripted.script.t import ScriptContext

__all__ = ["RunSource", "ScriptRun", "ScriptSucceeded", "kind_of"]

# The last steps that a report carries; more than it shows, for readers of the data.
REPORTED_STEPS = 64


class ScriptSucceeded(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The script passed. ``steps`` and the digests cover its own steps; ``reached`` counts its windows by name.

    ``compared`` outputs were compared with the same requests run alone; ``skipped`` were not, by the reason.
    ``loose_ends`` counts, by name, what a script that tests something seldom leaves. ``printed`` is what it printed and
    nothing has shown yet. ``spent``: the script killed a stage, so the engine is of no further use. ``records``,
    ``notes`` (each window at its first step) and ``limits`` are there when the options asked for a record.
    """

    steps: int
    digest: str
    plan_digest: str
    reached: dict[str, int]
    compared: int = 0
    skipped: dict[str, int] = {}
    loose_ends: dict[str, int] = {}
    printed: str = ""
    spent: bool = False
    records: tuple[StepRecord, ...] = ()
    notes: tuple[Note, ...] = ()
    limits: Limits | None = None

    def counts(self) -> dict[str, int]:
        """What the summary of many scripts adds up, by name."""
        skipped = {f"{NOT_COMPARED}{reason}": count for reason, count in self.skipped.items()}
        return {"steps": self.steps, "compared": self.compared} | self.loose_ends | skipped


class ScriptRun:
    """A script on its way through the gate. ``keeps_output``: what it prints is for another process to show."""

    def __init__(
        self,
        function: ScriptFunction,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        options: ScriptOptions,
        *,
        keeps_output: bool = False,
    ) -> None:
        self.function = function
        self.options = options
        self.context: ScriptContext | None = None
        self.script: Generator[Any, None, Any] | None = None
        self.compared = Compared()
        self.started = time.perf_counter()
        self._args = args
        self._kwargs = kwargs
        self._steps = 0
        self._spent = False
        self._digest = ""
        self._plan_digest = ""
        self._records: tuple[StepRecord, ...] = ()
        self._limits: Limits | None = None
        self._loose_ends: dict[str, int] = {}
        self._printed = io.StringIO() if keeps_output else None

    def begin(self, context: ScriptContext) -> None:
        """Make the generator; its body starts with the first step."""
        self.context = context
        self.script = self.function(context, *self._args, **self._kwargs)

    def end(self, scheduler: Scheduler, *, spent: bool) -> None:
        """Note how far the engine got, before the harness goes on with its own work; ``spent``: it lost its stages."""
        self._spent = spent
        self._steps = scheduler.step_number
        self._digest = scheduler.digests.digest
        self._plan_digest = scheduler.digests.plan_digest
        if self.context is not None:
            self._loose_ends = self.context.loose_ends()
        if self.options.record and self.context is not None:
            self._records, self._limits = self.context.history, scheduler.limits

    def resume(self) -> Any:
        """Let the script run to its next yield and return what it yields. Raises StopIteration at its end."""
        return self._go_on(next)

    def stop(self, why: Exception) -> NoReturn:
        """Raise this at the script's line, so that it is shown there; a script that catches it has failed as well."""
        with contextlib.suppress(StopIteration):
            self._go_on(lambda script: script.throw(why))
        raise why

    def _go_on(self, on: Callable[[Generator[Any, None, Any]], Any]) -> Any:
        assert self.script is not None
        with ExitStack() as stack:
            if self._printed is not None:
                stack.enter_context(contextlib.redirect_stdout(self._printed))
                stack.enter_context(without_debugger())
            with no_departure():
                return on(self.script)

    def take_printed(self) -> str:
        """What the script has printed since the last call."""
        if self._printed is None:
            return ""
        text = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        return text

    @property
    def _notes(self) -> tuple[Note, ...]:
        return () if self.context is None else tuple(self.context.notes)

    def succeeded(self) -> ScriptSucceeded:
        """The reply of a run that passed."""
        reached = {} if self.context is None else dict(self.context.reached)
        return ScriptSucceeded(
            steps=self._steps,
            digest=self._digest,
            plan_digest=self._plan_digest,
            reached=reached,
            compared=self.compared.outputs,
            skipped=self.compared.skipped,
            loose_ends=self._loose_ends,
            printed=self.take_printed(),
            spent=self._spent,
            records=self._records,
            notes=self._notes,
            limits=self._limits,
        )

    def report(self, rig: Rig, exc: BaseException, *, kind: FailureKind, mutant: str | None) -> FailureReport:
        """The report of a run that raised ``exc``, in the script or under it."""
        code = code_of(self.function)
        frames = frames_of(exc, inside=code.co_filename) or position_of(self.script) or (definition_of(code),)
        died = kind is FailureKind.DIED
        state = "" if self.context is None else _state_text(self.context)
        records = rig.history.records
        kept = records if self.options.record else records[-REPORTED_STEPS:]
        return FailureReport(
            kind=kind,
            error=error_text(exc, ScriptContext, self.function),
            frames=frames,
            printed=self.take_printed(),
            script=f"{code.co_filename}::{self.function.__name__}",
            tier=rig.world.tier,
            mutant=mutant,
            state=state,
            log=log_of(kept, rig.scheduler.limits, call_names(records)),
            notes=self._notes,
            replay=self.options.replay,
            # A server that has lost a stage ends in a moment: the next script must not meet it.
            spent=rig.is_dead or rig.failure is not None or isinstance(exc, Grown),
            dead_process=(exc.process if isinstance(exc, ProcessDiedError) else "scheduler") if died else None,
            cause="".join(traceback.format_exception(exc)) if died and not isinstance(exc, ProcessDiedError) else None,
        )


def kind_of(exc: BaseException) -> FailureKind:
    """How a run that raised this did not pass, if the engine lives."""
    if isinstance(exc, NotIdle):
        return FailureKind.DIRTY
    return FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.FAILED


def _state_text(context: ScriptContext) -> str:
    try:
        return str(context.state)
    except Exception as exc:  # noqa: BLE001 - a report on a broken engine must come out all the same
        return f"not readable ({exc})"


class RunSource(Protocol):
    """Where a scripted gate gets its scripts and leaves their results."""

    warms_up: bool

    def open(self) -> None: ...

    def next_run(self) -> ScriptRun | None:
        """Wait for the next script; None when there will be none."""
        ...

    def progress(self, rig: Rig, run: ScriptRun | None) -> None:
        """A step is about to run; the records of all steps before it are in the rig's history."""
        ...

    def ended(self, rig: Rig, run: ScriptRun | None) -> None:
        """A run passed; None stands for the warm-up."""
        ...

    def failed(self, rig: Rig, run: ScriptRun | None, exc: Exception) -> None:
        """A run raised; the engine lives."""
        ...

    def crashed(self, rig: Rig, run: ScriptRun | None, exc: BaseException) -> None:
        """The loop died of an exception."""
        ...

    def close(self) -> None:
        """The loop has ended."""
        ...
