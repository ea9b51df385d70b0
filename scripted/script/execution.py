"""One run of one script: its function, its arguments, how far it got; where scripts come from; how one ended."""

from __future__ import annotations

import contextlib
import inspect
import io
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, NoReturn

import msgspec

from scripted.core.errors import NotIdle, Overdue
from scripted.core.refusals import HarnessError
from scripted.report.failure import FailureKind, FailureReport, error_of
from scripted.report.frames import definition_of, frames_of, position_of
from scripted.report.step_log import FleetLog, Note, StepLog
from scripted.report.tally import ASKED
from scripted.script.context import BaseContext
from scripted.script.interruptions import Verdict, error_text, no_departure, without_debugger
from scripted.script.measure import Measured
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction, code_of
from scripted.script.watchdog import Struck, watchdog

# A ``finally`` that yields needs another one.
_MOST_CLOSES: Final = 100
# Scripts that yield whenever they are closed. They are kept, so that nobody collects them.
_never_ending: Final[list[Generator[Any, None, Any]]] = []


class ScriptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The script passed. ``steps`` are its own; ``reached`` counts its windows by name.

    ``compared`` outputs were equal to those of the same requests run alone. ``loose_ends`` counts, by name, what a
    script that tests something seldom leaves; ``asked``, by line and text, how often each of its assertions ran.
    ``log`` has every step, ``notes`` each window at its first one and ``fleet`` the steps of other engines, where the
    options asked for a record.
    """

    steps: int
    reached: dict[str, int]
    compared: int = 0
    loose_ends: dict[str, int] = {}
    log: StepLog | None = None
    notes: tuple[Note, ...] = ()
    fleet: FleetLog | None = None
    asked: dict[str, int] = {}

    def counts(self) -> dict[str, int]:
        """What the summary of many scripts adds up, by name."""
        asked = {f"{ASKED}{assertion}": count for assertion, count in self.asked.items()}
        return {"steps": self.steps, "compared": self.compared} | self.loose_ends | asked


class ScriptExecution:
    """One run of a script. With ``keeps_output`` another process shows its output.

    ``steps`` and ``loose_ends`` are noted at its end. Reports name the configuration by ``config_text``.
    """

    config_text = ""

    def __init__(
        self,
        function: ScriptFunction,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        options: ScriptOptions,
        *,
        keeps_output: bool = False,
    ) -> None:
        self.function = function
        self.options = options
        self.context: BaseContext | None = None
        self.script: Generator[Any, None, Any] | None = None
        self.started = time.perf_counter()
        # Whether the watchdog of this process has struck.
        self.is_late: Callable[[], bool] = lambda: False
        self.steps = 0
        self.loose_ends: dict[str, int] = {}
        self._asked = Measured(function) if options.must_assert else None
        self._args = args
        self._kwargs = kwargs
        self._printed = io.StringIO() if keeps_output else None

    def begin(self, context: BaseContext) -> None:
        """Make the generator; its body starts with the first step."""
        self.context = context
        self.script = self.function(context, *self._args, **self._kwargs)

    def end(self, steps: int) -> None:
        """Note how far it got, before the harness goes on with its own work."""
        self.steps = steps
        if self.context is not None:
            # A bool that counts would be no count on the wire.
            self.loose_ends = {name: int(count) for name, count in self.context.loose_ends().items()}
            self._check_asked(self.context)

    def _check_asked(self, context: BaseContext) -> None:
        """Raise BadCall for a script that asked nothing; note what an honest one seldom leaves."""
        if self._asked is not None:
            self._asked.check_made()
            if not (self.options.must_reach or context.is_smoke):
                self._asked.check_asked()
            self.loose_ends |= self._asked.loose_ends()

    @property
    def asked(self) -> dict[str, int]:
        """How often each assertion of the script ran."""
        return {} if self._asked is None else self._asked.own_sites()

    def resume(self) -> Any:
        """Let the script run to its next yield and return what it yields. Raises StopIteration at its end."""
        return self._go_on(next)

    def stop(self, why: Exception) -> NoReturn:
        """Raise this at the script's line, so that it is shown there; a script that catches it has failed as well."""
        with contextlib.suppress(StopIteration):
            self._go_on(lambda script: script.throw(why))
        raise why

    def close(self) -> None:
        """The script is not resumed again: what it has still to do at its end, it does now, and in no other script."""
        for _ in range(_MOST_CLOSES):
            if self.script is None or inspect.getgeneratorstate(self.script) == inspect.GEN_CLOSED:
                return
            with contextlib.suppress(Exception):  # what it raises now has no report; another one yields in a finally
                self._go_on(lambda script: script.close())
        if self.script is not None:
            _never_ending.append(self.script)

    def _go_on(self, on: Callable[[Generator[Any, None, Any]], Any]) -> Any:
        script = self.script
        assert script is not None
        with ExitStack() as stack:
            if self._printed is not None:
                stack.enter_context(contextlib.redirect_stdout(self._printed))
                stack.enter_context(without_debugger())
            if self._asked is not None:
                stack.enter_context(self._asked)
            with no_departure():
                try:
                    result = on(script)
                except StopIteration:
                    self._check_time()
                    raise
                except (Overdue, Struck) as exc:
                    signal.setitimer(signal.ITIMER_REAL, 0)  # another strike would meet the report
                    if isinstance(exc, Overdue):
                        raise
                    raise self._overdue().with_traceback(exc.__traceback__) from None
                self._check_time()
                return result

    def _check_time(self) -> None:
        if self.is_late():
            raise self._overdue()

    def _overdue(self) -> Overdue:
        limit = f"timeout_s={self.options.timeout_s:g}"
        return Overdue(f"the script did not end within {limit}, and caught what ends it")

    def take_printed(self) -> str:
        """What the script has printed since the last call."""
        if self._printed is None:
            return ""
        text = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        return text

    def report(self, run: Any, exc: BaseException, kind: FailureKind, mutant: str | None, **more: Any) -> FailureReport:
        """The report of a script that raised ``exc``, itself or under it; with what more an adapter knows."""
        code = code_of(self.function)
        return FailureReport(
            kind=kind,
            error=error_text(exc, self.function, run.handles.all),
            frames=frames_of(exc, inside=code.co_filename) or position_of(self.script) or definition_of(code),
            printed=self.take_printed(),
            script=f"{code.co_filename}::{self.function.__name__}",
            tier=run.tier,
            mutant=mutant,
            config=self.config_text,
            state=self._readable_state(run),
            notes=self.notes,
            replay=self.options.replay,
            ending=exc.ending if isinstance(exc, Verdict) else None,
            **more,
        )

    def state_text(self, run: Any) -> str:
        """The state of the scheduler, for a report."""
        del run
        return ""

    def _readable_state(self, run: Any) -> str:
        try:
            return self.state_text(run)
        except Exception as exc:  # noqa: BLE001 - a report on a broken scheduler must come out all the same
            return f"not readable ({exc})"

    def outcome(self) -> dict[str, Any]:
        """The fields of an outcome that every adapter has."""
        notes = self.notes if self.options.record else ()
        return {
            "steps": self.steps,
            "reached": self.reached,
            "loose_ends": self.loose_ends,
            "asked": self.asked,
            "notes": notes,
        }

    @property
    def notes(self) -> tuple[Note, ...]:
        """Each window at its first step, and the lines of the script that acted."""
        return () if self.context is None else (*self.context.notes, *self.context.line_notes())

    @property
    def reached(self) -> dict[str, int]:
        return {} if self.context is None else dict(self.context.reached)


class ScriptSource:
    """Where a run gets its scripts and leaves how they ended. ``run`` is the ScriptedRun."""

    warms_up = False

    def open(self) -> None:
        """The run begins."""

    def next_script(self) -> Any:
        """Wait for the next script; None when there will be none."""
        raise NotImplementedError

    def progress(self, run: Any, script: Any) -> None:
        """A step is about to run; the records of all steps before it are in the run."""

    def ended(self, run: Any, script: Any) -> None:
        """A script passed; None stands for the warm-up."""

    def failed(self, run: Any, script: Any, exc: Exception) -> None:
        raise NotImplementedError

    def crashed(self, run: Any, script: Any, exc: BaseException) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


def kind_of(exc: BaseException) -> FailureKind:
    """How a script that raised this did not pass, if the engine lives."""
    if isinstance(exc, NotIdle):
        return FailureKind.DIRTY
    return FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.FAILED


class OneScript(ScriptSource):
    """A source of one script, which keeps how it ended: what it raised, and the report of that, as it was then."""

    def __init__(self, script: ScriptExecution, mutant: str | None) -> None:
        self.script = script
        self.error: BaseException | None = None
        self.report: FailureReport | None = None
        self._mutant = mutant
        self._next: ScriptExecution | None = script

    def close(self) -> None:
        """Nothing is open."""

    def next_script(self) -> ScriptExecution | None:
        script, self._next = self._next, None
        return script

    def failed(self, run: Any, script: Any, exc: Exception) -> None:
        self.error, self.report = exc, script.report(run, exc, kind_of(exc), self._mutant)

    def crashed(self, run: Any, script: Any, exc: BaseException) -> None:
        self.error = exc
        if not isinstance(exc, HarnessError):  # which says nothing about the script
            kind = FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.DIED
            self.report = script.report(run, exc, kind, self._mutant)


def run_one(
    source: OneScript, drive: Callable[[OneScript], object], switched_on: AbstractContextManager[object]
) -> None:
    """Run the one script of a source, with a mutant or none. Raises the ScriptError of a script that did not pass."""
    timeout_s = source.script.options.timeout_s
    with ExitStack() as stack:
        stack.enter_context(switched_on)
        source.script.is_late = stack.enter_context(watchdog(timeout_s))
        try:
            drive(source)
        except Exception:
            if source.report is None:
                raise
    if source.report is not None:
        raise error_of(source.report) from source.error
