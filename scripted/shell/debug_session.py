"""A debugging session: runs statements as they are typed, in a script that waits for its next line between two steps.

Owns the list of statements, which is the whole session: undo and a death end the run, and the list runs again on a new
scheduler. Touches the scheduler only through ``t``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable

from rich.console import Console
from rich.live import Live

from scripted.core.errors import BadCall, BudgetSpent, Overdue, RequestRefused
from scripted.core.machine import ConfigIn
from scripted.core.phrases import nearest, plural, printable
from scripted.core.protocol import Adapter
from scripted.core.refusals import BadCommand, ScriptDefinitionError
from scripted.report.failure import FailureReport, ScriptError
from scripted.report.step_log import StepLog, log_of_adapter
from scripted.report.table import render_text, step_table
from scripted.report.trace import Trace, TraceHeader
from scripted.script.context import BaseContext
from scripted.script.execution import ScriptOutcome
from scripted.script.handles import BaseRequest
from scripted.script.on_adapters import script_runner
from scripted.script.options import ScriptOptions
from scripted.script.state import State
from scripted.script.wait import Steps
from scripted.shell.command_line import Command, Order, Own, completions, help_text, read_command
from scripted.shell.display import news_of, requests_table, state_table
from scripted.shell.prompt import Prompt
from scripted.shell.saved import save_session
from scripted.shell.statements import Names, Statement, lines_of, value_of
from scripted.shell.words import ShellWord, words_of

# A person may leave the session for hours in the middle of a race.
SESSION_TIMEOUT_S: Final = 24 * 3600.0
SESSION_MAX_STEPS: Final = 1_000_000
TABLE_WIDTH_COLUMNS: Final = 118


@runtime_checkable
class SuggestsCommands(Protocol[ConfigIn]):
    """An adapter that suggests commands for a configuration."""

    def first_commands(self, config: ConfigIn) -> Sequence[str]:
        """Return the commands that bring a new session to a launch in flight."""
        ...


class _RunAgain(BadCall):
    """Ends a run so that the changed statements run on a new scheduler."""


class DebugSession:
    """Reads lines and runs them on a scheduler of this adapter, with a ``mutant`` if one is given."""

    def __init__(
        self, adapter: Adapter, config: Any, prompt: Prompt, console: Console, *, mutant: str | None = None
    ) -> None:
        self.statements: list[Statement] = []
        self.words: Mapping[str, ShellWord] = {}
        self.refused = 0
        self._adapter = adapter
        self._config = config
        self._prompt = prompt
        self._console = console
        self._mutant = mutant
        self._left = self._is_undone = False
        self._saving: Path | None = None
        # The run that waits for its next line, and the report of a run that died.
        self._t: BaseContext | None = None
        self._died_with: FailureReport | None = None

    def run(self) -> bool:
        """Run until the end of the input; True if the scheduler then drained and every check held."""
        options = ScriptOptions(
            timeout_s=SESSION_TIMEOUT_S, max_steps=SESSION_MAX_STEPS, check_every_step=self._mutant is None, record=True
        )
        while not self._left:
            try:
                done = script_runner(self._adapter.name).run_script(
                    self._script, {}, config=self._config, options=options, mutant=self._mutant
                )
            except ScriptError as exc:
                if not isinstance(exc.__cause__, _RunAgain):
                    self._say(exc.report.render())
                    self._after_death(exc.report)
                self._save()
            else:
                self._t = None
                self._say(_verdict(done))
                return True
        return False

    def trace(self) -> Trace | None:
        """Return the run so far while the session waits for a line; None before the first step."""
        report = self._died_with
        if report is not None:
            log = report.failed_log
        else:
            log = None if self._t is None else log_of_adapter(self._adapter, self._t.history, self._config)
        if log is None or not log.steps:
            return None
        header = TraceHeader(
            title="session",
            adapter=self._adapter.name,
            config=dict(self._adapter.config_words(self._config)),
            outcome="running" if report is None else report.headline,
            mutant=self._mutant,
            died=report is not None,
        )
        return Trace(header, log)

    def first_commands(self) -> Sequence[str]:
        """Suggest commands for a new session that fit this scheduler."""
        adapter = self._adapter
        return adapter.first_commands(self._config) if isinstance(adapter, SuggestsCommands) else ()

    def state(self) -> State | None:
        """Return the scheduler's state; None if it is dead."""
        return None if self._t is None else self._t.state

    def completions(self, line: str) -> list[str]:
        return completions(line, self.words, self.statements)

    # -- the script --

    def _script(self, t: BaseContext) -> Steps:
        """Run the statements so far, then each line until the input ends."""
        self._t, self._died_with = t, None
        self.words = words_of(t)
        names: Names = {"t": t}
        for statement in tuple(self.statements):
            yield from statement.perform(names)
        self._prompt.complete_with(self.completions)
        if self._is_undone:
            self._say(str(t.state))
            self._is_undone = False
        while (command := self._next_command(f"step {t.state.step}> ")) is not None:
            if not isinstance(command, Order):
                yield from self._go(command, t, names)
            elif command.word in (Own.UNDO, Own.SAVE):
                self._change(command)
            else:
                self._look(command, names)
        self._left = True

    def _go(self, statement: Statement, t: BaseContext, names: Names) -> Steps:
        """Run a statement and record it. If it fails, run the others again, so that nothing has changed."""
        before = set(news_of(names))
        self.statements.append(statement)
        with self._live(t) as refresh:
            try:
                for _ in statement.perform(names):
                    refresh()
                    yield
            except Overdue:
                raise
            except Exception as exc:
                self.statements.pop()
                self._refuse(f"{_text_of(exc, names)}\nnothing was changed")
                raise _RunAgain("a statement failed") from exc
        for line in news_of(names):
            if line not in before:
                self._say(line)
        self._say(str(t.state))

    @contextlib.contextmanager
    def _live(self, t: BaseContext) -> Iterator[Callable[[], None]]:
        """On a terminal, show a table that follows the steps."""
        if not self._prompt.is_interactive or not self._console.is_terminal:
            yield lambda: None
            return
        with Live(state_table(t.state), console=self._console, transient=True) as live:
            yield lambda: live.update(state_table(t.state))

    # -- commands --

    def _next_command(self, prompt: str) -> Command | None:
        """Return the next command; None at the end."""
        while (line := self._prompt.read(prompt)) is not None:
            if not line.strip() or line.lstrip().startswith("#"):
                continue
            try:
                command = read_command(line, self.statements, self.words, self._adapter.actions)
            except BadCommand as exc:
                self._refuse(str(exc))
                continue
            if isinstance(command, Order) and command.word is Own.UNDO and command.count > len(self.statements):
                self._refuse(f"there are {len(self.statements)} commands to undo, got undo {command.count}")
                continue
            return None if isinstance(command, Order) and command.word is Own.QUIT else command
        return None

    def _look(self, order: Order, names: Names) -> None:
        if order.word is Own.STATE:
            state = self.state()
            assert state is not None, "a session that looks has a run"
            self._say(render_text(state_table(state), TABLE_WIDTH_COLUMNS))
        elif order.word is Own.REQUESTS:
            handles = [value for value in names.values() if isinstance(value, BaseRequest)]
            self._say(render_text(requests_table(handles), TABLE_WIDTH_COLUMNS))
        elif order.word is Own.HISTORY:
            assert self._t is not None, "a session that looks has a run"
            self._say_history(log_of_adapter(self._adapter, self._t.history, self._config), order.count)
        elif order.word is Own.SHOW:
            try:
                self._say(printable(repr(value_of(order.text, names))))
            except Exception as exc:  # noqa: BLE001 - the expression's error is its answer
                self._refuse(_text_of(exc, names))
        else:
            self._say(self._text_of_order(order))

    def _say_history(self, log: StepLog, count: int) -> None:
        self._say(render_text(step_table(log, last=count), TABLE_WIDTH_COLUMNS))

    def _text_of_order(self, order: Order) -> str:
        if order.word is Own.SCRIPT:
            return "\n".join(lines_of(self.statements)) or "nothing yet"
        return self.words[order.text].help if order.text else help_text(self.words)

    def _change(self, order: Order) -> None:
        """Note the change and end the run, since the scheduler must not run meanwhile."""
        if order.word is Own.UNDO:
            undone = self.statements[-order.count :]
            del self.statements[-order.count :]
            self._is_undone = True
            self._say("undone: " + "; ".join(lines_of(undone)))
        else:
            self._saving = Path(order.text)
        raise _RunAgain("the session goes on in a new run")

    def _save(self) -> None:
        path, self._saving = self._saving, None
        if path is None:
            return
        try:
            save_session(path, self._adapter, self._config, self.statements, mutant=self._mutant)
        except (ScriptDefinitionError, OSError) as exc:
            self._refuse(str(exc))
        else:
            self._say(f"{path}: {len(self.statements)} commands; pytest {path} runs it")

    # -- after a death --

    def _after_death(self, report: FailureReport) -> None:
        """Take commands after the scheduler's death: only history, script, undo, save, help and quit."""
        if self._left:
            return
        self._t, self._died_with = None, report
        self._say("The scheduler is dead. undo takes the last command back; history, script, save, help and quit work.")
        while (command := self._next_command("dead> ")) is not None:
            word = command.word if isinstance(command, Order) else None
            if isinstance(command, Order) and word is Own.HISTORY:
                assert report.log is not None, "a scheduler that has died had steps"
                self._say_history(report.log, command.count)
            elif isinstance(command, Order) and word in (Own.HELP, Own.SCRIPT):
                self._say(self._text_of_order(command))
            elif isinstance(command, Order) and word in (Own.SAVE, Own.UNDO):
                with contextlib.suppress(_RunAgain):
                    self._change(command)
                if word is Own.UNDO:
                    return
                self._save()
            else:
                self._refuse("the scheduler is dead; undo first")
        self._left = True

    def _refuse(self, why: str) -> None:
        self.refused += 1
        self._say("".join(f"! {line}\n" for line in why.splitlines()).rstrip())

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


def _text_of(exc: Exception, names: Names) -> str:
    """Return the text of an error, with its type if it comes from an expression.

    An unknown name is often a field of the state.
    """
    if isinstance(exc, (BadCall, BudgetSpent, RequestRefused)):
        return str(exc)
    meant = ""
    if isinstance(exc, NameError) and exc.name is not None:
        known = [*(name for name in names if not name.startswith("_")), "state"]
        name = exc.name or ""
        is_field = hasattr(names["t"].state, name)
        meant = nearest(f"state.{name}", [f"state.{name}"]) if is_field else nearest(name, known)
        meant = meant or f"; names are {', '.join(known)}"
    return f"{type(exc).__name__}: {exc}{meant}"


def _verdict(done: ScriptOutcome) -> str:
    digest = f", digest {done.log.steps[-1].digest}" if done.log is not None and done.log.steps else ""
    compared = plural(done.counts()["compared"], "output")
    return f"the scheduler drained and every check held: {plural(done.steps, 'step')}{digest}, {compared} compared"
