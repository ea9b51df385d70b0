"""The execution of one script, the outcome if it passed, and the sources that feed scripts to a run."""

from __future__ import annotations

import contextlib
import inspect
import io
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Final, Generic, NoReturn, Protocol

import msgspec
from typing_extensions import TypeVar

from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.core.errors import BadCall, NotIdle, Overdue
from scripted.core.phrases import text_of
from scripted.core.refusals import HarnessError
from scripted.report.failure import FailureKind, FailureReport, error_of
from scripted.report.frames import definition_of, frames_of, position_of
from scripted.report.step_log import FleetLog, Note, StepLog
from scripted.report.tally import ASKED
from scripted.script.context import BaseContext
from scripted.script.handles import BaseRequest, Handles
from scripted.script.hard_deadline import hard_deadline
from scripted.script.interruptions import Verdict, error_text, no_departure, with_origins, without_debugger
from scripted.script.measure import Measured
from scripted.script.options import ScriptOptions
from scripted.script.source import ScriptFunction, code_of
from scripted.script.watchdog import Struck, watchdog

# A ``finally`` that yields has to be closed again.
_MOST_CLOSES: Final = 100
# Scripts that yield whenever they are closed. Kept alive: the collector would close them again.
_never_ending: Final[list[Generator[object, None, object]]] = []


class ScriptOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a script that passed after ``steps`` steps; ``reached`` counts its windows by name.

    ``compared`` counts the outputs that equalled the same request run alone. ``loose_ends`` counts, by name, leftovers
    that are likely mistakes. ``asked`` counts how often each assertion ran, by line and text. If the options ask for a
    record, ``log`` has every step, ``notes`` the first step of each window, and ``fleet`` the steps of other engines.
    ``digest`` and ``plan_digest`` cover the script's own steps; empty for an adapter without digests.
    """

    steps: int
    reached: dict[str, int]
    digest: str = ""
    plan_digest: str = ""
    compared: int = 0
    loose_ends: dict[str, int] = {}
    log: StepLog | None = None
    notes: tuple[Note, ...] = ()
    fleet: FleetLog | None = None
    asked: dict[str, int] = {}

    def counts(self) -> dict[str, int]:
        """Return the counts that the summary of many scripts adds up, by name."""
        assertions = {f"{ASKED}{assertion}": count for assertion, count in self.asked.items()}
        return {"steps": self.steps, "compared": self.compared} | self.loose_ends | assertions


class DrivenRun(Protocol):
    """The run that a script drives, as reports see it."""

    handles: Handles

    @property
    def tier(self) -> str: ...


RunT = TypeVar("RunT", bound=DrivenRun, contravariant=True, default=Any)


class ScriptExecution(Generic[RunT]):
    """One run of a script. With ``keeps_output`` its output is captured for another process to print.

    Its end sets ``steps`` and ``loose_ends``. Reports name the ``adapter`` and describe its configuration by
    ``config_text``.
    """

    adapter = DEFAULT_ADAPTER
    config_text = ""

    def __init__(
        self,
        function: ScriptFunction,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
        options: ScriptOptions,
        *,
        keeps_output: bool = False,
    ) -> None:
        self.function = function
        self.options = options
        self.context: BaseContext | None = None
        self.script: Generator[object, None, object] | None = None
        self.started = time.perf_counter()
        # Whether this process's watchdog has struck.
        self.is_late: Callable[[], bool] = lambda: False
        self.steps = 0
        self.loose_ends: dict[str, int] = {}
        self._asked = Measured(function) if options.must_assert else None
        self._args = args
        self._kwargs = kwargs
        self._printed = io.StringIO() if keeps_output else None

    def begin(self, context: BaseContext) -> None:
        """Create the generator; its body starts with the first ``resume``."""
        self.context = context
        self.script = self.function(context, *self._args, **self._kwargs)

    def end(self, steps: int) -> None:
        """Record the script's steps and loose ends before the harness runs steps of its own."""
        self.steps = steps
        if self.context is not None:
            # On the wire a bool is not a count.
            self.loose_ends = {name: int(count) for name, count in self.context.loose_ends().items()}
            self._check_asked(self.context)

    def _check_asked(self, context: BaseContext) -> None:
        """Raise BadCall for a script that asserted nothing; record its loose ends."""
        if self._asked is not None:
            self._asked.check_made()
            if not (self.options.must_reach or context.is_smoke):
                self._asked.check_asked()
            self.loose_ends |= self._asked.loose_ends()

    @property
    def asked(self) -> dict[str, int]:
        """How often each assertion of the script ran."""
        return {} if self._asked is None else self._asked.own_sites()

    def resume(self) -> object:
        """Let the script run to its next yield, and return the yielded value. Raises StopIteration at its end."""
        return self._go_on(next)

    def stop(self, why: Exception) -> NoReturn:
        """Raise an exception at the script's line, where the report shows it; a script that catches it fails too."""
        with contextlib.suppress(StopIteration):
            self._go_on(lambda script: script.throw(why))
        raise why

    def close(self) -> None:
        """Close the generator now, so that its clean-up does not run during another script."""
        for _ in range(_MOST_CLOSES):
            if self.script is None or inspect.getgeneratorstate(self.script) == inspect.GEN_CLOSED:
                return
            with contextlib.suppress(Exception):  # too late for a report, and a yield in a finally raises one
                self._go_on(lambda script: script.close())
        if self.script is not None:
            _never_ending.append(self.script)

    def _go_on(self, on: Callable[[Generator[object, None, object]], object]) -> object:
        script = self.script
        assert script is not None
        with ExitStack() as stack:
            if self._printed is not None:
                stack.enter_context(contextlib.redirect_stdout(self._printed))
                stack.enter_context(without_debugger())
            if self._asked is not None:
                stack.enter_context(self._asked)
            with no_departure(), with_origins():
                try:
                    result = on(script)
                except StopIteration:
                    self._check_time()
                    raise
                except (Overdue, Struck) as exc:
                    signal.setitimer(signal.ITIMER_REAL, 0)  # another alarm would interrupt the report
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
        """Return the captured output since the last call."""
        if self._printed is None:
            return ""
        text = self._printed.getvalue()
        self._printed.seek(0)
        self._printed.truncate()
        return text

    def report(
        self, run: RunT, exc: BaseException, kind: FailureKind, mutant: str | None, **more: Any
    ) -> FailureReport:
        """Report a script that ``exc`` ended, raised by the script or below it; ``more`` are an adapter's fields."""
        state = self._readable_state(run)
        return self._report(exc, kind, mutant, run.handles.all, tier=run.tier, state=state, **more)

    def report_without_run(self, exc: Overdue, mutant: str | None) -> FailureReport:
        """Report a script whose time was over before it had a run, or while its failure was reported."""
        return self._report(exc, FailureKind.TIMEOUT, mutant, (), tier="sim")

    def _report(
        self, exc: BaseException, kind: FailureKind, mutant: str | None, handles: Sequence[BaseRequest], **more: Any
    ) -> FailureReport:
        code = code_of(self.function)
        return FailureReport(
            kind=kind,
            error="\n".join([error_text(exc, self.function, handles), *self._forgotten(exc)]),
            frames=frames_of(exc, inside=code.co_filename) or position_of(self.script) or definition_of(code),
            printed=self.take_printed(),
            script=f"{code.co_filename}::{self.function.__name__}",
            adapter=self.adapter,
            mutant=mutant,
            config=self.config_text,
            notes=self.notes,
            replay=self.options.replay,
            ending=exc.ending if isinstance(exc, Verdict) else None,
            **more,
        )

    def _forgotten(self, exc: BaseException) -> Iterator[str]:
        """Name what the script made and never ran before it failed: the failure may follow from that."""
        checks = [] if self.context is None else [self.context.check_waits]
        for check in checks if self._asked is None else [*checks, self._asked.check_made]:
            try:
                check()
            except BadCall as forgotten:
                if text_of(forgotten) != text_of(exc):
                    yield f"before it {forgotten}"

    def state_text(self, run: RunT) -> str:
        """Describe the scheduler's state for a report."""
        del run
        return ""

    def _readable_state(self, run: RunT) -> str:
        try:
            return self.state_text(run)
        except Exception as exc:  # noqa: BLE001 - a broken scheduler must not break its own report
            return f"not readable ({exc})"

    def outcome(self) -> dict[str, Any]:
        """Return the fields of an outcome that all adapters have."""
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
        """The first step of each window, and the script's lines that called verbs."""
        return () if self.context is None else (*self.context.notes, *self.context.line_notes())

    @property
    def reached(self) -> dict[str, int]:
        return {} if self.context is None else dict(self.context.reached)


ScriptT = TypeVar("ScriptT", bound=ScriptExecution, default=Any)


class ScriptSource(ABC, Generic[RunT, ScriptT]):
    """Feeds scripts to a run and receives their results. ``run`` is the ScriptedRun; script None is the warm-up."""

    warms_up = False

    def open(self) -> None:
        """Start together with the run."""

    @abstractmethod
    def next_script(self) -> ScriptT | None:
        """Wait for the next script; None if there is none left."""

    def progress(self, run: RunT, script: ScriptT | None) -> None:
        """Note that a step is about to run; the run has the records of all steps before it."""

    def ended(self, run: RunT, script: ScriptT | None) -> None:
        """Note that a script passed."""

    @abstractmethod
    def failed(self, run: RunT, script: ScriptT | None, exc: Exception) -> None:
        """Handle a script that failed while the engine lives."""

    @abstractmethod
    def crashed(self, run: RunT, script: ScriptT | None, exc: BaseException) -> None:
        """Handle the death of the engine, during a script or between two."""

    @abstractmethod
    def close(self) -> None:
        """End together with the run."""


def kind_of(exc: BaseException) -> FailureKind:
    """Classify a script's failure by its exception, for an engine that lives."""
    if isinstance(exc, NotIdle):
        return FailureKind.DIRTY
    return FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.FAILED


class OneScript(ScriptSource[RunT, ScriptExecution[RunT]]):
    """A source of one script that keeps the exception and the report of its failure."""

    def __init__(self, script: ScriptExecution, mutant: str | None) -> None:
        self.script = script
        self.error: BaseException | None = None
        self.report: FailureReport | None = None
        self._mutant = mutant
        self._next: ScriptExecution | None = script

    def close(self) -> None:
        """Do nothing: nothing is open."""

    def next_script(self) -> ScriptExecution | None:
        script, self._next = self._next, None
        return script

    def failed(self, run: RunT, script: ScriptExecution | None, exc: Exception) -> None:
        del script
        self.error, self.report = exc, self.script.report(run, exc, kind_of(exc), self._mutant)

    def crashed(self, run: RunT, script: ScriptExecution | None, exc: BaseException) -> None:
        del script
        self.error = exc
        if not isinstance(exc, HarnessError):  # a HarnessError says nothing about the script
            kind = FailureKind.TIMEOUT if isinstance(exc, Overdue) else FailureKind.DIED
            self.report = self.script.report(run, exc, kind, self._mutant)

    def overdue(self, exc: Overdue) -> None:
        """Handle a deadline that struck where no run could report it, as while the engine is built."""
        if self.report is None:
            self.error, self.report = exc, self.script.report_without_run(exc, self._mutant)


def run_one(
    source: OneScript, drive: Callable[[OneScript], object], switched_on: AbstractContextManager[object]
) -> None:
    """Run the script of a source, optionally with a mutant. Raises ScriptError if it does not pass."""
    timeout_s = source.script.options.timeout_s
    try:
        with ExitStack() as stack:
            stack.enter_context(switched_on)
            stack.enter_context(hard_deadline(timeout_s))
            source.script.is_late = stack.enter_context(watchdog(timeout_s, is_busy=source.script.options.is_busy))
            drive(source)
    except Overdue as exc:
        source.overdue(exc)
    except Exception:
        if source.report is None:
            raise
    if source.report is not None:
        raise error_of(source.report) from source.error
