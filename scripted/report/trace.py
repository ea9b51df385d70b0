"""The trace: every step of one run, in one file of JSON lines.

Owns the file format and its types; runs nothing. A trace is written when a run ends, and read by ``scripted view``, the
demo and other tools.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from lockstep.errors import LockstepError
from lockstep.output_files import write_output
from scripted.core.adapters import DEFAULT_ADAPTER
from scripted.report.step_log import EngineLog, FleetLog, Message, Note, ShownStep, Size, StepLog

_ConfigValue = str | int | float | bool | None
_Json = _ConfigValue | list[Any] | dict[str, Any]

_FORMAT: Final = "lockstep-trace-2"
_BEGINNING: Final = b'{"format":"lockstep-trace-'
# The format name in the first frame of every recording.
_RECORDING: Final = b"lockstep-recording"
_REMEDY: Final = "record the run again"


class TraceError(LockstepError, ValueError):
    """A file is not a trace, or is damaged; the text names the file, the line and the remedy."""


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The setup and the outcome of a run.

    ``config`` has the settings of the ``adapter`` that differ from their defaults. ``outcome`` is 'passed' or the
    failure in one line; ``died``: the scheduler did not survive the last step. ``mutant`` is the bug that was switched
    on. The ``schedule``, or the ``script`` (``FILE::NAME``) with its ``arguments``, repeats the run.
    """

    title: str
    tier: Literal["sim", "server"] = "sim"
    adapter: str = DEFAULT_ADAPTER
    config: dict[str, _ConfigValue] = {}
    outcome: str
    mutant: str | None = None
    died: bool = False
    schedule: str = ""
    script: str = ""
    arguments: dict[str, _Json] = {}


class Trace(msgspec.Struct, frozen=True):
    """One run: its header, its steps in order, remarks on them, and the engines of its fleet if it had one."""

    header: TraceHeader
    log: StepLog
    notes: tuple[Note, ...] = ()
    fleet: FleetLog | None = None


class _HeaderLine(msgspec.Struct, frozen=True):
    """The first line. ``format`` distinguishes a trace from other JSON."""

    format: str
    header: TraceHeader
    stages: Size
    depth: Size


class _Line(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Any other line: one step, note, engine of a fleet, or message between engines."""

    step: ShownStep | None = None
    note: Note | None = None
    engine: EngineLog | None = None
    message: Message | None = None


_header_decoder = msgspec.json.Decoder(_HeaderLine)
_line_decoder = msgspec.json.Decoder(_Line)


def write_trace(path: str | Path, trace: Trace) -> None:
    """Write a trace to ``path``, replacing any file there, and create its folders. Equal traces give equal bytes."""
    lines: list[_HeaderLine | _Line] = [_HeaderLine(_FORMAT, trace.header, trace.log.stages, trace.log.depth)]
    lines += [_Line(step=step) for step in trace.log.steps]
    lines += [_Line(note=note) for note in trace.notes]
    if trace.fleet is not None:
        lines += [_Line(engine=engine) for engine in trace.fleet.engines]
        lines += [_Line(message=message) for message in trace.fleet.messages]
    write_output(Path(path), msgspec.json.Encoder().encode_lines(lines))


def is_trace(path: Path) -> bool:
    """Return whether a file begins like a trace of any version."""
    with path.open("rb") as file:
        return file.read(len(_BEGINNING)) == _BEGINNING


def read_trace(path: str | Path) -> Trace:
    """Read a file from ``write_trace``. Raises TraceError for any other file, OSError for an unreadable one."""
    path = Path(path)
    first, *rest = path.read_bytes().splitlines() or [b""]
    header = _read_header(path, first)
    lines = [_read_line(path, number, data) for number, data in enumerate(rest, start=2)]
    steps: list[ShownStep] = []
    for number, line in enumerate(lines, start=2):
        if line.step is not None:
            _check_order(path, number, steps, line.step)
            steps.append(line.step)
    notes = tuple(line.note for line in lines if line.note is not None)
    engines = tuple(line.engine for line in lines if line.engine is not None)
    messages = tuple(line.message for line in lines if line.message is not None)
    fleet = FleetLog(engines, messages) if engines else None
    return Trace(header.header, StepLog(header.stages, header.depth, tuple(steps)), notes, fleet)


def _read_header(path: Path, data: bytes) -> _HeaderLine:
    try:
        line = _header_decoder.decode(data)
    except (ValueError, RecursionError) as exc:
        if _RECORDING in data:
            raise TraceError(
                f"{path} is a recording and not a trace; run it again and keep the trace: "
                f"scripted replay {path} --trace {path.with_suffix('.jsonl')}"
            ) from exc
        raise TraceError(
            f"{path}, line 1: not the header of a trace ({exc}); give a file of `scripted run --trace`"
        ) from exc
    if line.format != _FORMAT:
        raise TraceError(
            f"{path}, line 1: the format must be {_FORMAT!r}, got {line.format!r}; {_REMEDY} with this version"
        )
    return line


def _read_line(path: Path, number: int, data: bytes) -> _Line:
    try:
        line = _line_decoder.decode(data)
    except (ValueError, RecursionError) as exc:
        raise TraceError(f"{path}, line {number}: not a step or a note of a trace ({exc}); {_REMEDY}") from exc
    if sum(one is not None for one in (line.step, line.note, line.engine, line.message)) != 1:
        raise TraceError(f"{path}, line {number}: must hold one step, note, engine or message, got {line}; {_REMEDY}")
    return line


def _check_order(path: Path, number: int, steps: list[ShownStep], step: ShownStep) -> None:
    if steps and step.step <= steps[-1].step:
        raise TraceError(
            f"{path}, line {number}: steps must grow, got step {step.step} after {steps[-1].step}; "
            f"the file holds two runs or was edited: {_REMEDY}"
        )
