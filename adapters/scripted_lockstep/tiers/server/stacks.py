"""Stacks of the engine's processes, for the report of a script that hangs.

Every process writes its Python stacks to the server's log at the stack signal. This module signals one process after
the other, and observes which of them computes meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import psutil

from engine.process.signals import STACK_SIGNAL
from scripted.report.failure import Activity, ProcessStack
from scripted.script.handled_signals import is_handling

# A running process writes its stacks in a millisecond, and on a busy machine once it has its turn.
STACK_TIMEOUT_S: Final = 5.0
_LOOK_INTERVAL_S: Final = 0.01
_QUIET_S: Final = 0.05
# A process that uses more than this share of a core computes; a waiting one uses none.
_BUSY_SHARE: Final = 0.2
# From these lines on a stack shows only the start of the process or thread, which is always the same.
_START_OF_PROCESS: Final = re.compile(
    r'engine/server/launch/child\.py"|runpy|threading\.py", line \d+ in (run|_bootstrap)'
)
# A thread of every stage that only waits for the end of the supervisor.
_IDLE_THREAD: Final = "end_with_supervisor"
_STANDARD_LIBRARY: Final = str(Path(os.__file__).parent)


def dump_stacks(pids: Mapping[str, int], log: Path) -> tuple[ProcessStack, ...]:
    """Return the stack of each process; a stopped or dead process has a note instead.

    ``log`` is the server's; a placed stage has its own.
    """
    started, before = time.monotonic(), {pid: _cpu_s(pid) for pid in pids.values()}
    texts = {name: _ask(pid, _log_of(pid) or log) if _can_answer(pid) else "" for name, pid in pids.items()}
    passed_s = time.monotonic() - started
    return tuple(
        ProcessStack(f"{name} (pid {pid})", readable_stack(texts[name]), _activity(pid, before[pid], passed_s))
        for name, pid in pids.items()
    )


def readable_stack(text: str) -> str:
    """Return Python's own dump without the lines that are the same in every process: the start, and idle threads."""
    threads = [_inner_lines(thread) for thread in text.split("\n\n") if not _is_idle(thread)]
    return "\n\n".join(threads)


def _is_idle(thread: str) -> bool:
    """Return whether a thread waits for the supervisor, or runs only code of Python's own library."""
    files = [line for line in thread.splitlines() if line.lstrip().startswith('File "')]
    return _IDLE_THREAD in thread or (bool(files) and all(_STANDARD_LIBRARY in line for line in files))


def _inner_lines(thread: str) -> str:
    lines: list[str] = []
    for line in thread.splitlines():
        if lines and _START_OF_PROCESS.search(line):
            break
        lines.append(line.replace(f'"{Path.cwd()}/', '"').replace(f'"{_STANDARD_LIBRARY}/', '"'))
    return "\n".join(lines)


def _can_answer(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _activity(pid: int, cpu_before_s: float, passed_s: float) -> Activity:
    try:
        status = psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return Activity.GONE
    if status == psutil.STATUS_STOPPED:
        return Activity.STOPPED
    return Activity.COMPUTES if _cpu_s(pid) - cpu_before_s > _BUSY_SHARE * passed_s else Activity.WAITS


def _cpu_s(pid: int) -> float:
    try:
        times = psutil.Process(pid).cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system)


def _log_of(pid: int) -> Path | None:
    """Return the file that receives a process's stderr: its own, or its parent's, which copies a pipe."""
    with contextlib.suppress(OSError, psutil.Error):
        process = psutil.Process(pid)
        for one in (process, *process.parents()):
            file = Path(f"/proc/{one.pid}/fd/2").readlink()
            if file.is_file():
                return file
    return None


def _ask(pid: int, log: Path) -> str:
    start = log.stat().st_size
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, STACK_SIGNAL)
    deadline, size, quiet_since = time.monotonic() + STACK_TIMEOUT_S, start, time.monotonic()
    while time.monotonic() < deadline:
        time.sleep(_LOOK_INTERVAL_S)
        if log.stat().st_size != size:
            size, quiet_since = log.stat().st_size, time.monotonic()
        elif size > start and time.monotonic() - quiet_since > _QUIET_S and not is_handling(pid, STACK_SIGNAL):
            break
    with log.open("rb") as file:
        file.seek(start)
        return file.read().decode("utf-8", "replace").strip() or f"it did not answer within {STACK_TIMEOUT_S} s"
