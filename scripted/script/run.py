"""The run that scripts drive, for every adapter: its next step waits for the script's next yield.

For each script, it prepares the scheduler, runs the script and settles everything that the script left open. Each
``yield`` lets one step run; then the run judges the step and updates handles and clients.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterable
from types import TracebackType
from typing import Any, ClassVar, Final, Self

from scripted.core.action import Action
from scripted.core.errors import BadCall, BudgetSpent
from scripted.core.machine import ConfigT, DeviceT, EventT, MachineT, OutputT, RecordT, StepT
from scripted.core.oracle import OracleT
from scripted.core.run import Run
from scripted.core.schedule import Schedule
from scripted.script.context import BaseContext
from scripted.script.execution import ScriptExecution, ScriptSource
from scripted.script.handles import Handles
from scripted.script.state import MicrobatchInFlight
from scripted.script.wait import Steps, words_of_yielded

# A script has its own budget of steps, and the run ends only when the script does.
_NEVER: Final = 2**62


class ScriptedRun(Run[ConfigT, EventT, StepT, OutputT, RecordT, MachineT, DeviceT, OracleT], ABC):
    """Runs scripts from ``source``, which also receives their results. ``arrived`` are events of the next step.

    An adapter's subclass defines snapshots of its scheduler, and the steps before and after a script.
    """

    tier: str = "sim"
    context_type: type[BaseContext]
    is_dead: bool = False
    records: list[RecordT]

    def __init__(
        self,
        config: ConfigT,
        of: str,
        source: ScriptSource | None,
        *,
        parts: tuple[MachineT, DeviceT, OracleT] | None = None,
    ) -> None:
        super().__init__(Schedule(config, (), of), record=True, parts=parts)
        self.handles = Handles()
        self.launches = 0
        self.script: ScriptExecution | None = None
        # The exception that the script itself raised, as opposed to a violation by the scheduler.
        self.script_error: BaseException | None = None
        # None for an engine of a fleet that no script drives.
        self._source: Any = source
        self._context: BaseContext | None = None
        self._driver: Generator[None, None, None] | None = None
        self._last_step = self._steps_limit = _NEVER
        self._composing = False

    # -- defined by adapters --

    @property
    def scheduler(self) -> Any:
        return self.machine

    @abstractmethod
    def take_state(self) -> Any:
        """Take a snapshot for the script."""

    @property
    def is_fully_idle(self) -> bool:
        """True when nothing waits, runs or is in flight, and nothing has arrived."""
        return self.machine.is_idle and not self.arrived

    @abstractmethod
    def last_batch(self) -> MicrobatchInFlight | None:
        """Return the last launch while it is in flight, and in the step that takes its result."""

    @abstractmethod
    def decoding_in(self, batch: MicrobatchInFlight) -> set[str]:
        """Return the rids that decode in a batch."""

    @abstractmethod
    def causes(self) -> Iterable[str]:
        """Return known reasons why requests do not advance, each with its remedy, as clauses of a message."""

    # The cause that ``causes`` gives for an idle scheduler.
    idle_words: ClassVar[str] = "the scheduler is idle, so no further step can change anything"

    @property
    def is_at_rest(self) -> bool:
        """True when nothing is in flight, waiting, held or due, and the last step did nothing: nor will the next.

        A buggy scheduler may call itself idle, so open work is looked up in the harness's own books.
        """
        is_owed = len(self.results) > 0 or self.handles.live() or self.handles.open_calls()
        if is_owed or not self.records or self.did_something(self.records[-1]):
            return False
        return [*self.causes()] == [self.idle_words]

    @abstractmethod
    def did_something(self, record: RecordT) -> bool:
        """Return whether a step had events or an effect."""

    def shown_steps(self, busy: int) -> int:
        """Return how many of the last steps to show so that ``busy`` of them did something; all steps if fewer did."""
        left = busy
        for count, record in enumerate(reversed(self.records), 1):
            left -= self.did_something(record)
            if not left:
                return count
        return len(self.records)

    @abstractmethod
    def can_fail(self, record: RecordT) -> bool:
        """Return whether a step launched something that can fail, or took a failure."""

    def before_script(self, script: ScriptExecution) -> Steps:
        """Bring the scheduler to its initial state, which a new one is already in."""
        del script
        yield from ()

    @abstractmethod
    def after_script(self, script: ScriptExecution) -> Steps:
        """Settle everything that the script left open, and judge the end. Raises Violation."""

    @abstractmethod
    def take_step(self, stepped: OutputT) -> None:
        """Record and judge the last step. Raises Violation."""

    def warm_up(self) -> Steps:
        """Run the warm-up steps before the first script, if the source wants a warm-up."""
        yield from ()

    # -- for verbs --

    def act(self, action: Action) -> None:
        """Apply an action now, between two steps; events for the scheduler arrive with its next step."""
        action.apply(self)

    def give(self, event: EventT) -> None:
        """Add an event to the next step, after the results that are due."""
        (self._events if self._composing else self.arrived).append(event)

    # -- the gate protocol of the loop --

    def __enter__(self) -> Self:
        self._source.open()
        if self._source.warms_up:
            self._driver = self.warm_up()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if exc is not None:
            self.note_death(exc)
            self._source.crashed(self, self.script, exc)
            if self.script is not None and not isinstance(exc, KeyboardInterrupt):
                self._end_context()
                self.script.close()
        self._source.close()
        self._end_context()

    def note_death(self, exc: BaseException) -> None:
        """Record the step that did not return, if the scheduler died in one."""
        super().__exit__(type(exc), exc, exc.__traceback__)

    def next_step(self, previous: OutputT | None) -> StepT | None:
        """Resume the script until it yields for a step, or go on to the next script; None after the last one."""
        while True:
            if self._driver is None:
                self.script = self._source.next_script()
                if self.script is None:
                    return None
                self._driver = self._drive(self.script)
            try:
                if previous is not None:
                    self._previous = previous
                    self.take_step(previous)
                self.begin_composing()
                next(self._driver)
                self._composing = True
                step = self.compose(previous)
            except StopIteration:
                self._driver = None
                self._source.ended(self, self.script)
            except self.fatal:
                raise
            except Exception as exc:  # noqa: BLE001 - any exception of a script is its result
                self._source.failed(self, self.script, self.as_found(exc))
                self._driver.close()
                self._driver = None
                if self.script is not None:
                    self._end_context()
                    self.script.close()
            else:
                if step is not None:
                    self._source.progress(self, self.script)
                    return step
            finally:
                self._composing = False
            previous = None

    fatal: ClassVar[tuple[type[Exception], ...]] = ()

    def as_found(self, exc: Exception) -> Exception:
        """Return the exception that reports a script's failure."""
        return exc

    # -- one script --

    def _drive(self, script: ScriptExecution) -> Steps:
        self._end_context()
        yield from self.before_script(script)
        context = self._context = self.context_type(self, must_reach=script.options.must_reach)
        script.begin(context)
        yield from self._script_steps(script, context)
        context.check_waits()
        if script.options.must_step and not self.step:
            self._refuse(BadCall("the script ended without a step, so nothing was tested; a yield lets one step run"))
        try:
            script.end(self.step)
        except BadCall as exc:
            self._refuse(exc)
        yield from self.after_script(script)

    def _end_context(self) -> None:
        if self._context is not None:
            self._context.end()

    def _script_steps(self, script: ScriptExecution, context: BaseContext) -> Steps:
        """Forward the script's yields, within its budget of steps."""
        most = script.options.max_steps
        for steps in range(most + 1):
            context._note_position(script.script)  # noqa: SLF001 - not a verb of scripts, but part of their run
            try:
                value = script.resume()
            except StopIteration:
                return
            except BaseException as exc:
                self.script_error = exc
                raise
            if value is not None:
                self._refuse(BadCall(f"a script yields nothing, got {words_of_yielded(value)}"))
            try:
                context.check_waits()
            except BadCall as exc:
                self._refuse(exc)
            self.check_can_step(script)
            if steps == most:
                causes = "; ".join(self.causes()) or "@scripted(..., max_steps=N) allows more"
                self._stop(script, BudgetSpent(f"the script ran its max_steps={most} steps; {context.state}; {causes}"))
            yield

    def check_can_step(self, script: ScriptExecution) -> None:
        """Stop the script if no step can run."""

    def _refuse(self, exc: Exception) -> None:
        self.script_error = exc
        raise exc

    def _stop(self, script: ScriptExecution, why: Exception) -> None:
        self.script_error = why
        script.stop(why)
