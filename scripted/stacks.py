"""Stacks of the engine's processes, for the report of a script that hangs.

Every process writes its Python stacks to the server's log when it gets the stack signal; this asks them one by one.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from engine.launch.signals import STACK_SIGNAL
from scripted.report import ProcessStack

__all__ = ["dump_stacks"]

# A process that runs writes its stacks in a millisecond.
STACK_TIMEOUT_S: Final = 0.5
_LOOK_INTERVAL_S: Final = 0.01
_QUIET_S: Final = 0.05


def dump_stacks(pids: Mapping[str, int], log: Path) -> tuple[ProcessStack, ...]:
    """What each process is doing now. A process that is stopped or gone has no stack, and that is said instead."""
    return tuple(ProcessStack(f"{name} (pid {pid})", _stack_of(pid, log)) for name, pid in pids.items())


def _stack_of(pid: int, log: Path) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):
        if psutil.Process(pid).status() == psutil.STATUS_STOPPED:
            return "stopped by a signal (SIGSTOP); it does nothing until it gets SIGCONT"
        return _ask(pid, log)
    return "gone"


def _ask(pid: int, log: Path) -> str:
    start = log.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline, size, quiet_since = time.monotonic() + STACK_TIMEOUT_S, start, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_INTERVAL_S)
        if log.stat().st_size != size:
            size, quiet_since = log.stat().st_size, time.monotonic()
        elif size > start and time.monotonic() - quiet_since > _QUIET_S:
            break
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace").strip() or f"it did not answer within {STACK_TIMEOUT_S} s"
