"""Gives recorders time to write before the parent process kills their engines, as vLLM's front end does at once."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, Protocol

import psutil

from scripted.sdk.flight.live import process_of, words_of
from scripted.sdk.flight.recorder import FOLDER_VARIABLE, HEARS, LIVE_SUFFIX, SIGNAL

_LOOK_S: Final = 0.02
# As long as a recorder lets a disk delay an engine's end.
_LONGEST_S: Final = 10.0


class Engine(Protocol):
    """An engine's process, as multiprocessing has it."""

    @property
    def pid(self) -> int | None: ...

    def is_alive(self) -> bool: ...

    def terminate(self) -> None: ...


def stop_engines(engines: Iterable[Engine]) -> None:
    """Tell the recorded ones of these engines to stop, and wait until each has written what it leaves."""
    live = _announced(_folder())
    asked = [(engine, live[engine.pid]) for engine in engines if engine.pid in live]
    before = {path: _time(path) for _, path in asked}
    for engine, _ in asked:
        engine.terminate()
    deadline = time.monotonic() + _LONGEST_S
    while any(engine.is_alive() and before[path] == _time(path) is not None for engine, path in asked):
        if time.monotonic() >= deadline:
            return
        time.sleep(_LOOK_S)


def ask_engines() -> None:
    """Ask the recorded engines that this process started for their rings, without waiting."""
    children = {child.pid for child in psutil.Process().children(recursive=True)}
    for pid in children.intersection(_announced(_folder())):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNAL)


def _folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


def _announced(folder: Path) -> dict[int | None, Path]:
    """Return the announcements of the recorders that hear signals, by process."""
    return {
        pid: path
        for path in folder.glob(f"*{LIVE_SUFFIX}")
        if HEARS in words_of(path) and (pid := process_of(path)) is not None
    }


def _time(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None
