"""Asks the recorder of a running server for its ring, by a signal and within a bounded time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import psutil

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.flight.recorder import (
    ALL,
    DEAF,
    FOLDER_VARIABLE,
    LIVE_SUFFIX,
    MOST_FILES,
    SIGNAL,
    SUFFIX,
    flights_of,
    is_full,
)

_LOOK_S: Final = 0.05
_LONGEST_S: Final = 20.0
# A file's time and a process's come from different clocks.
_CLOCKS_DIFFER_S: Final = 2.0


def flight_of(place: Path) -> Path:
    """Return the file itself, or for a recorder's folder the ring of the server that records there.

    Without a running server, this is the folder's newest file; also if the server dies before it answers, because its
    crash is there. Raises ScriptDefinitionError if there is none.
    """
    if not place.is_dir():
        return place
    running = sorted({pid for pid in map(process_of, place.glob(f"*{LIVE_SUFFIX}")) if pid is not None})
    if len(running) > 1:
        raise ScriptDefinitionError(
            f"{len(running)} servers record in {place}, with the processes {', '.join(map(str, running))}; give each a "
            f"{FOLDER_VARIABLE} of its own"
        )
    answer = _asked(place, running[0]) if running else None
    flights = _by_age(place.glob(f"*{SUFFIX}"))
    if not flights:
        left = "; one has ended without an open request, or was killed" if any(place.glob(f"*{LIVE_SUFFIX}")) else ""
        raise ScriptDefinitionError(
            f"no server records in {place}, and no flight is there{left}; start it with {FOLDER_VARIABLE}={place}"
        )
    return answer or flights[-1]


def _by_age(paths: Iterable[Path]) -> list[Path]:
    return sorted(paths, key=lambda path: path.stat().st_mtime_ns)


def process_of(path: Path) -> int | None:
    """Return the process of a file that a recorder keeps while it runs; None if that process is gone.

    The signal would end a stranger. The pid may belong to another container, so the process must have started when the
    file says.
    """
    try:
        number, *more = words_of(path)
        pid, written = int(number), path.stat().st_mtime
        started = float(more[-1]) if len(more) > 1 else None
    except (OSError, ValueError):
        return None
    return pid if _runs(pid, written, started) else None


def words_of(live: Path) -> list[str]:
    """Return the words of a recorder's announcement; none once it is gone."""
    try:
        return live.read_text().split()
    except (OSError, ValueError):
        return []


def _runs(pid: int, written: float, started: float | None = None) -> bool:
    """Whether the process that announced itself at this time can still answer: not a zombie, not a reused pid."""
    try:
        process = psutil.Process(pid)
        begun: float = process.create_time()
        is_zombie = process.status() == psutil.STATUS_ZOMBIE
    except (psutil.Error, ValueError, OverflowError):
        return False
    is_it = begun <= written + _CLOCKS_DIFFER_S if started is None else abs(begun - started) <= _CLOCKS_DIFFER_S
    return not is_zombie and is_it


def _asked(folder: Path, pid: int) -> Path | None:
    """Return the file of all steps, or the file that the process writes or renews now; None if it ends meanwhile."""
    whole = next(folder.glob(f"*-{pid}-{ALL}{SUFFIX}"), None)
    if whole is not None:
        return whole
    before = _times(folder, pid)
    newest = f"; the newest flight there is {_by_age(before)[-1]}" if before else ""
    refusal = _refusal(folder, pid)
    if refusal is not None:
        raise ScriptDefinitionError(f"the process {pid} {refusal}{newest}")
    asked = time.time()
    try:
        os.kill(pid, SIGNAL)
    except ProcessLookupError:
        return None
    except PermissionError as exc:
        raise ScriptDefinitionError(f"the process {pid} belongs to another user; ask as that user{newest}") from exc
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        new = [path for path, when in _times(folder, pid).items() if before.get(path) != when]
        if new:
            return _by_age(new)[-1]
        if not _runs(pid, asked):
            return None
        time.sleep(_LOOK_S)
    raise ScriptDefinitionError(
        f"the process {pid} has written no flight in {folder} within {_LONGEST_S:g} s; its log says why{newest}"
    )


def _refusal(folder: Path, pid: int) -> str | None:
    """Return why a signal to the process would go unanswered or end it; None if its recorder answers."""
    if _is_stopped(pid):
        return f"is stopped, by SIGSTOP or a debugger; continue it, for example with kill -CONT {pid}"
    announced = list(folder.glob(f"*-{pid}{LIVE_SUFFIX}"))
    if announced and all(DEAF in words_of(path) for path in announced):
        return (
            "takes no SIGUSR2, because its scheduler was made outside of the main thread, or the signal has another "
            "handler: it writes at a stall, at a crash and at its end"
        )
    if announced and all(is_full(folder, path.stem) for path in announced):
        left = sum([len(flights_of(folder, path.stem)) for path in announced])
        return f"has left {left} flights in {folder}, and a recorder leaves at most {MOST_FILES}; move some away"
    return None


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
    except psutil.Error:
        return False


def _times(folder: Path, pid: int) -> dict[Path, int]:
    """Return when each flight of a process was written or renewed."""
    return {path: path.stat().st_mtime_ns for path in folder.glob(f"*-{pid}-*{SUFFIX}")}
