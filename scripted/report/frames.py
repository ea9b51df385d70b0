"""Finds a script's lines that a report shows, in a traceback or a suspended generator, and formats them.

It knows no engine and no test runner.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final

import msgspec

from scripted.core.errors import MeantForTheScript
from scripted.core.installed import is_in_harness
from scripted.core.phrases import path_of

# How many frames are shown at each end of a long traceback.
SHOWN_FRAMES: Final = 12
_MOST_WIDTH_COLUMNS: Final = 118
_LEAST_WIDTH_COLUMNS: Final = 78
_MOST_DECORATOR_LINES: Final = 20


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback: its place, its function and its source."""

    file: str
    line: int
    function: str
    source: str


def width_of(terminal_columns: int | None) -> int:
    """Return the width of a report: a CI log's, or less on a narrow terminal. None stands for no terminal."""
    if terminal_columns is None:
        return _MOST_WIDTH_COLUMNS
    return max(_LEAST_WIDTH_COLUMNS, min(_MOST_WIDTH_COLUMNS, terminal_columns - 1))


def where_text(frames: tuple[Frame, ...], error: str) -> str:
    """Format the script's own lines as pytest does, innermost last, then the error."""
    lines = []
    for frame in _shortened(frames):
        if frame is None:
            lines += [f"... {len(frames) - 2 * SHOWN_FRAMES} frames like these ..."]
            continue
        lines += [f"{path_of(frame.file)}:{frame.line}: in {frame.function}", f">       {frame.source}"]
    lines += [f"E       {line}" for line in error.splitlines()]
    return "\n".join(lines)


def frames_of(exc: BaseException, *, inside: str) -> tuple[Frame, ...]:
    """Return the frames of a traceback, starting with the first in the file ``inside``; empty if there is none."""
    frames = [_frame(frame, line) for frame, line in _walk(exc) if not _is_hidden(frame)]
    first = next((index for index, frame in enumerate(frames) if _same_file(frame.file, inside)), None)
    if first is None:
        return ()
    shown = tuple(frame for frame in frames[first:] if not is_in_harness(frame.file))
    # An error that a verb or a wait raises or passes on deliberately is shown at the script's line.
    meant = isinstance(exc, MeantForTheScript) or shown[-1:] == (frames[-1],)
    return shown if shown and meant else tuple(frames[first:])


def left_by_stop_iteration(exc: BaseException) -> bool:
    """Return whether a StopIteration left a generator, which Python reports as a RuntimeError."""
    return isinstance(exc, RuntimeError) and isinstance(exc.__cause__, (StopIteration, StopAsyncIteration))


def position_of(script: Generator[object, Any, object] | None) -> tuple[Frame, ...]:
    """Return the position of a suspended generator and of the generators that it delegates to, outermost first.

    The harness's waits are left out: the script's line names them.
    """
    frames = []
    step: Any = script
    while isinstance(step, types.GeneratorType) and step.gi_frame is not None:
        frames.append(_frame(step.gi_frame, step.gi_frame.f_lineno))
        step = step.gi_yieldfrom
    return tuple(frame for frame in frames if not is_in_harness(frame.file))


def definition_of(code: types.CodeType) -> tuple[Frame, ...]:
    """Return a script's first line, shown if none of its lines is to blame; none for the harness's own code."""
    if is_in_harness(code.co_filename):
        return ()
    return (Frame(code.co_filename, code.co_firstlineno, code.co_name, _definition_line(code)),)


def _walk(exc: BaseException) -> Iterator[tuple[types.FrameType, int]]:
    """Walk a traceback, and below it the one of a StopIteration that Python turned into this RuntimeError.

    Python raises the RuntimeError where the generator was resumed, so the generator's own line is in the other one.
    """
    yield from walk_tb(exc.__traceback__)
    if left_by_stop_iteration(exc) and exc.__cause__ is not None:
        yield from walk_tb(exc.__cause__.__traceback__)


def _definition_line(code: types.CodeType) -> str:
    """Return the line of the ``def``, below its decorators."""
    for line in range(code.co_firstlineno, code.co_firstlineno + _MOST_DECORATOR_LINES):
        source = linecache.getline(code.co_filename, line).strip()
        if source.startswith("def "):
            return source
    return linecache.getline(code.co_filename, code.co_firstlineno).strip()


def _frame(frame: types.FrameType, line: int) -> Frame:
    file = frame.f_code.co_filename
    return Frame(file, line, frame.f_code.co_name, linecache.getline(file, line).strip())


def _is_hidden(frame: types.FrameType) -> bool:
    """Whether a frame hides itself from tracebacks, as ``pytest.fail()`` does."""
    return bool(frame.f_locals.get("__tracebackhide__", False))


def _same_file(left: str, right: str) -> bool:
    return left == right or Path(left).resolve() == Path(right).resolve()


def _shortened(frames: tuple[Frame, ...]) -> tuple[Frame | None, ...]:
    """Return the outermost and innermost frames, with None for the rest: a recursion may have a thousand."""
    if len(frames) <= 2 * SHOWN_FRAMES:
        return frames
    return (*frames[:SHOWN_FRAMES], None, *frames[-SHOWN_FRAMES:])
