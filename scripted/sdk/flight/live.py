"""Asks the recorder of a running server for what its ring holds: by a signal, within a bounded time."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Final

from scripted.core.refusals import ScriptDefinitionError
from scripted.sdk.flight.recorder import ALL, FOLDER_VARIABLE, LIVE_SUFFIX, SIGNAL, SUFFIX

_LOOK_S: Final = 0.05
_LONGEST_S: Final = 20.0


def flight_of(place: Path) -> Path:
    """Return the file itself, or for the folder of a recorder the ring of the server that runs there.

    Without a running server it is the newest file of the folder. Raises ScriptDefinitionError where there is none.
    """
    if not place.is_dir():
        return place
    running = sorted({pid for pid in map(_pid_of, place.glob(f"*{LIVE_SUFFIX}")) if pid is not None})
    if len(running) > 1:
        raise ScriptDefinitionError(
            f"{len(running)} servers record in {place}, with the processes {', '.join(map(str, running))}; give each a "
            f"{FOLDER_VARIABLE} of its own"
        )
    if running:
        return _asked(place, running[0])
    flights = sorted(place.glob(f"*{SUFFIX}"), key=lambda path: path.stat().st_mtime_ns)
    if not flights:
        raise ScriptDefinitionError(
            f"no server records in {place}, and no flight is there; start it with {FOLDER_VARIABLE}={place}"
        )
    return flights[-1]


def _pid_of(path: Path) -> int | None:
    """Return the process of a file that a recorder keeps while it runs; None if that process is gone."""
    try:
        pid = int(path.read_text())
        os.kill(pid, 0)
    except (OSError, ValueError):
        return None
    return pid


def _asked(folder: Path, pid: int) -> Path:
    """Return the file of all steps, or the one that the process writes now."""
    whole = next(folder.glob(f"*-{pid}-{ALL}{SUFFIX}"), None)
    if whole is not None:
        return whole
    before = set(folder.glob(f"*-{pid}-*{SUFFIX}"))
    os.kill(pid, SIGNAL)
    deadline = time.monotonic() + _LONGEST_S
    while time.monotonic() < deadline:
        new = set(folder.glob(f"*-{pid}-*{SUFFIX}")) - before
        if new:
            return new.pop()
        time.sleep(_LOOK_S)
    raise ScriptDefinitionError(
        f"the process {pid} has written no flight in {folder} within {_LONGEST_S:g} s; its log says why"
    )
