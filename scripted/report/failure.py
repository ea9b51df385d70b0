"""The report of a script that did not pass: everything that a reader of a CI log needs, as data, text and exception.

Created in the process that ran the script; completed and rendered in pytest's process.
"""

from __future__ import annotations

import re
import textwrap
from enum import StrEnum
from typing import Final, Literal

import msgspec

from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.report.frames import Frame, where_text, width_of
from scripted.report.step_log import FleetLog, Note, StepLog

# Steps in the table: enough for the window of a race and the steps before it.
SHOWN_STEPS = 16
# The script's current line, in the stack of its process, between two yields.
_IN_THE_SCRIPT = re.compile(
    r'File "([^"]+)", line (\d+) in \S+\n  File "[^"]*scripted/script/execution\.py", line \d+ in _go_on$', re.MULTILINE
)


class FailureKind(StrEnum):
    """The ways in which a script does not pass."""

    FAILED = "failed"
    TIMEOUT = "timeout"
    DIED = "died"
    DIRTY = "dirty"


class Activity(StrEnum):
    """The activity of a process when its stacks were taken."""

    COMPUTES = "computes"
    WAITS = "waits"
    STOPPED = "is stopped by a signal (SIGSTOP)"
    GONE = "is gone"


class ProcessStack(msgspec.Struct, frozen=True):
    """The Python stacks of one engine process, and its activity."""

    process: str
    text: str
    activity: Activity = Activity.WAITS


class Ending(msgspec.Struct, frozen=True):
    """A script that ended with ``pytest.skip`` or ``pytest.xfail``."""

    kind: Literal["skip", "xfail"]
    reason: str


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a script did not pass. ``log`` has its last steps; ``cause`` is a dead process's traceback or signal.

    ``when`` names the step and the scheduler's phase; ``inside`` has the scheduler's lines that raised, if any.
    ``printed`` is the end of the script's output from a process whose output is not shown. ``spent``: the engine cannot
    be used again; not ``begun``: it failed in its reset, before the script. ``fleet`` has the last steps of all engines
    of a fleet. ``ending``: the script skipped its test or expected its failure.
    """

    kind: FailureKind
    error: str
    frames: tuple[Frame, ...] = ()
    when: str = ""
    inside: tuple[Frame, ...] = ()
    script: str = ""
    adapter: str = DEFAULT_ADAPTER
    tier: str = ""
    mutant: str | None = None
    config: str = ""
    state: str = ""
    log: StepLog | None = None
    notes: tuple[Note, ...] = ()
    dead_process: str | None = None
    cause: str | None = None
    stacks: tuple[ProcessStack, ...] = ()
    printed: str = ""
    spent: bool = False
    begun: bool = True
    replay: str = ""
    fleet: FleetLog | None = None
    ending: Ending | None = None

    @property
    def failed_log(self) -> StepLog | None:
        """Return the last steps, with the failure attached to the final one."""
        return self.log if self.log is None or self.ending else self.log.failing(self.headline)

    @property
    def failed_fleet(self) -> FleetLog | None:
        """Return the last steps of a fleet, with the failure attached to the final one."""
        return self.fleet if self.fleet is None or self.ending else self.fleet.failing(self.headline)

    @property
    def headline(self) -> str:
        """The failure in one line."""
        first = self.error.splitlines()[0] if self.error else self.when or self.kind.value
        died = f"the {self.dead_process} process died: " if self.dead_process else ""
        return f"{died}{first}"

    def render(self, terminal_columns: int | None = None) -> str:
        """Return the report as text, as wide as a CI log, or narrower on a narrow terminal."""
        width = width_of(terminal_columns)
        inside = f"In the scheduler:\n{where_text(self.inside, '')}" if self.inside else ""
        what = [where_text(self.frames, self.error), self.when, inside, self._what()]
        parts = [*what, self._steps(width), self._facts(width)]
        parts += [f"--- {stack.process} {stack.activity} ---\n{stack.text}".rstrip() for stack in self.stacks]
        return "\n\n".join(part for part in parts if part)

    def _what(self) -> str:
        if self.kind is FailureKind.DIED:
            who = self.dead_process or "scheduler"
            text = f"The engine died under this script. The {who} process was the first to die"
            return f"{text}:\n{self.cause.rstrip()}" if self.cause else f"{text}."
        if self.kind is FailureKind.TIMEOUT:
            return _diagnosis(self.stacks)
        return ""

    def _steps(self, width: int) -> str:
        log, fleet = self.failed_log, self.failed_fleet
        if fleet is not None:
            logs = [(f"The last steps of engine {one.name}:", one.log, one.notes) for one in fleet.engines]
        else:
            logs = [] if log is None else [("The last steps before the end:", log, self.notes)]
        # The table needs rich, which makes importing the harness slow.
        from scripted.report.table import render_text, step_table

        tables = [(title, step_table(log, last=SHOWN_STEPS, notes=notes)) for title, log, notes in logs if log.steps]
        parts = [f"{title}\n{render_text(table, width).rstrip()}" for title, table in tables]
        if self.fleet is not None and self.fleet.messages:
            said = "\n".join(f"  {message.in_full}" for message in self.fleet.messages[-SHOWN_STEPS:])
            parts.append(f"The last messages between the engines:\n{said}")
        return "\n\n".join(parts)

    def _facts(self, width: int) -> str:
        facts = {
            "State": "\n         ".join(textwrap.wrap(self.state, width - 9)),
            "Engine": f"{self.adapter}, {self.tier} tier, {self.config}" if self.config else "",
            "Mutant": f"{self.mutant} is switched on: this failure is expected" if self.mutant else "",
            "Replay": self.replay,
        }
        return "\n".join(f"{name + ':':8} {fact}" for name, fact in facts.items() if fact)


class ScriptError(Exception):
    """A script did not pass. ``report`` has the data; ``str()`` is the report as text."""

    def __init__(self, report: FailureReport) -> None:
        super().__init__(report.headline)
        self.report = report

    def __str__(self) -> str:
        return self.report.render()


class ScriptFailed(ScriptError):
    """The script raised, or an invariant did not hold after one of its steps. The server is still usable."""


class ScriptTimeout(ScriptError):
    """The script did not end in time."""


class ServerDied(ScriptError):
    """The engine died while the script ran."""


class ServerDirty(ScriptError):
    """The engine could not be brought back to idle before the script; the report names the leftovers."""


_ERRORS: Final = {
    FailureKind.FAILED: ScriptFailed,
    FailureKind.TIMEOUT: ScriptTimeout,
    FailureKind.DIED: ServerDied,
    FailureKind.DIRTY: ServerDirty,
}


def error_of(report: FailureReport) -> ScriptError:
    return _ERRORS[report.kind](report)


def _diagnosis(stacks: tuple[ProcessStack, ...]) -> str:
    """Say whether the engine hung, deadlocked or was just slow, from the activity of its processes."""
    if not stacks:
        return ""  # the error says it
    found = "The script did not end in time. "
    still = [stack for stack in stacks if stack.activity in (Activity.STOPPED, Activity.GONE)]
    busy = [stack.process for stack in stacks if stack.activity is Activity.COMPUTES]
    if still:
        found += "; ".join(f"{stack.process} {stack.activity}" for stack in still) + ": nothing can get past it."
    elif script := next(filter(None, (_IN_THE_SCRIPT.search(stack.text) for stack in stacks)), None):
        found += f"The script itself does not come to its next yield: it is at {script[1]}:{script[2]}."
    elif busy:
        found += f"{', '.join(busy)} still computes: it is slow, or it is in a loop without end."
    else:
        found += "No process computes: each waits for another, which is a deadlock."
    return f"{found}\nThe stacks below show where each process was."
