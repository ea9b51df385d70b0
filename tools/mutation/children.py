"""Children: forks of this process that each do one thing, say what came of it, and are gone.

Bounds their processor time unit by unit, their memory and their wall clock. To be ended by a bound is a verdict.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterator
from typing import Final

import msgspec

__all__ = ["Ended", "run_children", "unit_time_limit"]

# A unit under a mutant may take so much longer than without before it counts as hanging.
_LIMIT_FACTOR: Final = 6.0
_LIMIT_LEAST_S: Final = 3.0
# A test of sockets that waits for what never comes takes no processor time.
_WAIT_LIMIT_S: Final = 40.0
# Waiting costs no processor time: a child that makes none is ended by the wall clock.
_SILENT_LIMIT_S: Final = 900.0
_MEMORY_LIMIT_BYTES: Final = 6 << 30
_READ_BYTES: Final = 1 << 16


class Ended(msgspec.Struct, frozen=True):
    """What a child wrote before it ended, and the signal that ended it, if one did. ``cpu_s`` is its processor time."""

    said: bytes
    signal: int
    cpu_s: float


class _Child(msgspec.Struct):
    pid: int
    task: int
    deadline: float
    said: bytes = b""


@contextlib.contextmanager
def unit_time_limit(healthy_s: float) -> Iterator[None]:
    """End this process, by SIGPROF or SIGALRM, if what is inside takes or waits far longer than it should."""
    signal.setitimer(signal.ITIMER_PROF, _LIMIT_LEAST_S + _LIMIT_FACTOR * healthy_s)
    signal.setitimer(signal.ITIMER_REAL, _WAIT_LIMIT_S + _LIMIT_FACTOR * healthy_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)


def run_children(tasks: Iterator[Callable[[Callable[[bytes], None]], None]], jobs: int) -> Iterator[tuple[int, Ended]]:
    """Run each task in a child of its own, ``jobs`` at a time; yields (number of the task, its end) as they end.

    A task is given the function by which it says something.
    """
    running: dict[int, _Child] = {}
    numbered = enumerate(tasks)
    more = True
    while more or running:
        while more and len(running) < jobs:
            number, task = next(numbered, (0, None))
            more = task is not None
            if task is not None:
                reader, child = _start(number, task)
                running[reader] = child
        yield from _collect(running)


def _start(number: int, task: Callable[[Callable[[bytes], None]], None]) -> tuple[int, _Child]:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        _be_a_child(task, writer)
    os.close(writer)
    return reader, _Child(pid, number, time.monotonic() + _SILENT_LIMIT_S)


def _be_a_child(task: Callable[[Callable[[bytes], None]], None], writer: int) -> None:
    try:
        nothing = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(nothing, standard)
        resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_LIMIT_BYTES, _MEMORY_LIMIT_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        task(lambda text: _write_all(writer, text))
    finally:
        # Not sys.exit: what the parent registered for its own end must not run here.
        os._exit(0)


def _write_all(writer: int, text: bytes) -> None:
    while text:
        text = text[os.write(writer, text) :]


def _collect(running: dict[int, _Child]) -> Iterator[tuple[int, Ended]]:
    soonest = min((child.deadline for child in running.values()), default=0.0)
    ready, _, _ = select.select(list(running), (), (), max(0.0, soonest - time.monotonic()))
    for reader in ready:
        part = os.read(reader, _READ_BYTES)
        running[reader].said += part
        if not part:
            yield _reap(running, reader)
    for reader, child in list(running.items()):
        if time.monotonic() > child.deadline:
            os.kill(child.pid, signal.SIGKILL)
            yield _reap(running, reader)


def _reap(running: dict[int, _Child], reader: int) -> tuple[int, Ended]:
    child = running.pop(reader)
    os.close(reader)
    _, status, usage = os.wait4(child.pid, 0)
    ended_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0
    return child.task, Ended(child.said, ended_by, usage.ru_utime + usage.ru_stime)
