"""The lines of a script that a report shows: found in a traceback or in a suspended generator, and as text.

It knows no engine and no test runner.
"""

from __future__ import annotations

import linecache
import types
from collections.abc import Generator
from pathlib import Path
from traceback import walk_tb
from typing import Any, Final

import msgspec

from scripted.core.installed import is_in_harness
from scripted.core.phrases import path_of

# Frames shown at each end of a long traceback.
SHOWN_FRAMES: Final = 12
_MOST_WIDTH_COLUMNS: Final = 118
_LEAST_WIDTH_COLUMNS: Final = 78
_MOST_DECORATOR_LINES: Final = 20


class Frame(msgspec.Struct, frozen=True):
    """One line of a traceback: where, in which function, and the source line itself."""

    file: str
    line: int
    function: str
    source: str


def width_of(terminal_columns: int | None) -> int:
    """How wide a report is: what a CI log shows, and less on a narrow terminal; None is no terminal."""
    if terminal_columns is None:
        return _MOST_WIDTH_COLUMNS
    return max(_LEAST_WIDTH_COLUMNS, min(_MOST_WIDTH_COLUMNS, terminal_columns - 1))


def where_text(frames: tuple[Frame, ...], error: str) -> str:
    """The script's own lines, innermost last, each as pytest shows it; then the error."""
    lines = []
    for frame in _shortened(frames):
        if frame is None:
            lines += [f"... {len(frames) - 2 * SHOWN_FRAMES} frames like these ..."]
            continue
        lines += [f"{path_of(frame.file)}:{frame.line}: in {frame.function}", f">       {frame.source}"]
    lines += [f"E       {line}" for line in error.splitlines()]
    return "\n".join(lines)


def frames_of(exc: BaseException, *, inside: str) -> tuple[Frame, ...]:
    """The frames of a traceback from the first line of the file ``inside`` on; empty when it never was in there."""
    frames = [_frame(frame, line) for frame, line in walk_tb(exc.__traceback__) if not _is_hidden(frame)]
    first = next((index for index, frame in enumerate(frames) if _same_file(frame.file, inside)), None)
    if first is None:
        return ()
    shown = tuple(frame for frame in frames[first:] if not is_in_harness(frame.file))
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
    return tuple(frame for frame in frames if not is_in_harness(frame.file))


def definition_of(code: types.CodeType) -> tuple[Frame, ...]:
    """Where a script begins: the line to show when none of its own is to blame; none for a script of the harness."""
    if is_in_harness(code.co_filename):
        return ()
    return (Frame(code.co_filename, code.co_firstlineno, code.co_name, _definition_line(code)),)


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


def _is_hidden(frame: types.FrameType) -> bool:
    """Whether a test runner would hide it: ``pytest.fail()``, or a script's function that asks for that."""
    return bool(frame.f_locals.get("__tracebackhide__", False))


def _same_file(left: str, right: str) -> bool:
    return left == right or Path(left).resolve() == Path(right).resolve()


def _shortened(frames: tuple[Frame, ...]) -> tuple[Frame | None, ...]:
    """The outermost and the innermost frames, with None for those between: a recursion has a thousand."""
    if len(frames) <= 2 * SHOWN_FRAMES:
        return frames
    return (*frames[:SHOWN_FRAMES], None, *frames[-SHOWN_FRAMES:])
