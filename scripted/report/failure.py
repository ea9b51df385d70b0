"""The report of a script that did not pass: everything that a person at a CI log needs, as data and as text.

Made where the script ran (in the scheduler process or in this one), completed and shown where pytest runs.
"""

from __future__ import annotations

import linecache
import textwrap
import types
from collections.abc import Generator
from enum import StrEnum
from pathlib import Path
from traceback import walk_tb
from typing import Any

import msgspec

from engine.limits import Limits
from engine.scheduler import StepRecord
from scripted.report.trace import Note

__all__ = [
    "Activity",
    "FailureKind",
    "FailureReport",
    "Frame",
    "ProcessStack",
    "definition_of",
    "frames_of",
    "position_of",
]

# Steps shown in the table; the window of a race and what led to it fit in them.
SHOWN_STEPS = 16
# Frames shown at each end of a long traceback.
SHOWN_FRAMES = 12
_HARNESS = Path(__file__).parents[1]
REPORT_WIDTH_COLUMNS = 118
_MOST_DECORATOR_LINES = 20


class FailureKind(StrEnum):
    """How a script did not pass."""

    FAILED = "failed"
    TIMEOUT = "timeout"
    DIED = "died"
    DIRTY = "dirty"


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback: where, in which function, and the source line itself."""

    file: str
    line: int
    function: str
    source: str


class Activity(StrEnum):
    """What a process was seen to do while its stacks were taken."""

    COMPUTES = "computes"
    WAITS = "waits"
    STOPPED = "is stopped by a signal (SIGSTOP)"
    GONE = "is gone"


class ProcessStack(msgspec.Struct, frozen=True):
    """What a process of the engine was doing: its name, what it does in short, and its Python stacks."""

    process: str
    text: str
    activity: Activity = Activity.WAITS


class FailureReport(msgspec.Struct, frozen=True, kw_only=True):
    """Why a script did not pass. ``records`` are its last steps; ``cause`` is a dead process's traceback or signal.

    ``printed`` is what the script printed last, in a process whose output is not shown. ``spent``: the engine is of no
    further use.
    """

    kind: FailureKind
    error: str
    frames: tuple[Frame, ...] = ()
    script: str = ""
    tier: str = ""
    mutant: str | None = None
    config: str = ""
    state: str = ""
    records: tuple[StepRecord, ...] = ()
    notes: tuple[Note, ...] = ()
    limits: Limits | None = None
    dead_process: str | None = None
    cause: str | None = None
    stacks: tuple[ProcessStack, ...] = ()
    printed: str = ""
    spent: bool = False
    replay: str = ""

    @property
    def headline(self) -> str:
        """The failure in one line."""
        first = self.error.splitlines()[0] if self.error else self.kind.value
        died = f"the {self.dead_process} process died: " if self.dead_process else ""
        return f"{died}{first}"

    def render(self) -> str:
        """The report as text, no wider than a CI log."""
        parts = [self._where(), self._what(), self._steps(), self._facts()]
        parts += [f"--- {stack.process} {stack.activity} ---\n{stack.text}".rstrip() for stack in self.stacks]
        return "\n\n".join(part for part in parts if part)

    def _where(self) -> str:
        """The script's own lines, innermost last, each as pytest shows it."""
        lines = []
        for frame in _shortened(self.frames):
            if frame is None:
                lines += [f"... {len(self.frames) - 2 * SHOWN_FRAMES} frames like these ..."]
                continue
            lines += [f"{_short(frame.file)}:{frame.line}: in {frame.function}", f">       {frame.source}"]
        lines += [f"E       {line}" for line in self.error.splitlines()]
        return "\n".join(lines)

    def _what(self) -> str:
        if self.kind is FailureKind.DIED:
            who = self.dead_process or "scheduler"
            text = f"The engine died under this script. The {who} process was the first to die"
            return f"{text}:\n{self.cause.rstrip()}" if self.cause else f"{text}."
        if self.kind is FailureKind.TIMEOUT:
            return _diagnosis(self.stacks)
        return ""

    def _steps(self) -> str:
        if not self.records or self.limits is None:
            return ""
        # The table needs rich, which the import of the harness should not pay for.
        from scripted.report.table import render_text, step_table

        table = step_table(self.records, self.limits, last=SHOWN_STEPS)
        return f"The last steps before the end:\n{render_text(table, REPORT_WIDTH_COLUMNS).rstrip()}"

    def _facts(self) -> str:
        facts = {
            "State": "\n         ".join(textwrap.wrap(self.state, REPORT_WIDTH_COLUMNS - 9)),
            "Engine": f"{self.tier} tier, {self.config}" if self.config else "",
            "Mutant": f"{self.mutant} is switched on: this failure is expected" if self.mutant else "",
            "Replay": self.replay,
        }
        return "\n".join(f"{name + ':':8} {fact}" for name, fact in facts.items() if fact)


def _shortened(frames: tuple[Frame, ...]) -> tuple[Frame | None, ...]:
    """The outermost and the innermost frames, with None for those between: a recursion has a thousand."""
    if len(frames) <= 2 * SHOWN_FRAMES:
        return frames
    return (*frames[:SHOWN_FRAMES], None, *frames[-SHOWN_FRAMES:])


def _diagnosis(stacks: tuple[ProcessStack, ...]) -> str:
    """Whether it was a hang, a deadlock or only slow, judged by what the processes were doing."""
    if not stacks:
        return "The script did not end in time."
    found = "The script did not end in time. "
    still = [stack for stack in stacks if stack.activity in (Activity.STOPPED, Activity.GONE)]
    busy = [stack.process for stack in stacks if stack.activity is Activity.COMPUTES]
    if still:
        found += "; ".join(f"{stack.process} {stack.activity}" for stack in still) + ": nothing can get past it."
    elif busy:
        found += f"{', '.join(busy)} still computes: it is slow, or it is in a loop without end."
    else:
        found += "No process computes: each waits for another, which is a deadlock."
    return f"{found}\nThe stacks below show where each process was."


def frames_of(exc: BaseException, *, inside: str) -> tuple[Frame, ...]:
    """The frames of a traceback from the first line of the file ``inside`` on; empty when it never was in there."""
    frames = [_frame(frame, line) for frame, line in walk_tb(exc.__traceback__)]
    first = next((index for index, frame in enumerate(frames) if _same_file(frame.file, inside)), None)
    if first is None:
        return ()
    shown = tuple(frame for frame in frames[first:] if not Path(frame.file).is_relative_to(_HARNESS))
    # What a verb or a wait raises on purpose, and what passes through one, is shown at the script's line.
    meant = getattr(exc, "is_meant_for_the_script", False) or shown[-1:] == (frames[-1],)
    return shown if shown and meant else tuple(frames[first:])


def position_of(script: Generator[Any, Any, Any] | None) -> tuple[Frame, ...]:
    """Where a suspended generator stands, outermost first: its own line, and those of what it delegates to.

    The harness's own waits are left out: the script's line says which it is.
    """
    frames = []
    step: Any = script
    while isinstance(step, types.GeneratorType) and step.gi_frame is not None:
        frames.append(_frame(step.gi_frame, step.gi_frame.f_lineno))
        step = step.gi_yieldfrom
    return tuple(frame for frame in frames if not Path(frame.file).is_relative_to(_HARNESS))


def definition_of(code: types.CodeType) -> Frame:
    """Where a script begins: the line to show when none of its own is to blame."""
    return Frame(code.co_filename, code.co_firstlineno, code.co_name, _definition_line(code))


def _definition_line(code: types.CodeType) -> str:
    """The line of the def, which follows its decorators."""
    for line in range(code.co_firstlineno, code.co_firstlineno + _MOST_DECORATOR_LINES):
        source = linecache.getline(code.co_filename, line).strip()
        if source.startswith("def "):
            return source
    return linecache.getline(code.co_filename, code.co_firstlineno).strip()


def _frame(frame: types.FrameType, line: int) -> Frame:
    file = frame.f_code.co_filename
    return Frame(file, line, frame.f_code.co_name, linecache.getline(file, line).strip())


def _same_file(left: str, right: str) -> bool:
    return left == right or Path(left).resolve() == Path(right).resolve()


def _short(file: str) -> str:
    """A path relative to the working folder, if it is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else file
