"""A process that a benchmark started, and its descendants: their CPU, their memory, their end.

Memory is the proportional share (PSS), so that what forked processes share counts once.
"""

from __future__ import annotations

import contextlib
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import psutil

from benchmarks.live_loop import process_cpu_s

__all__ = ["Family"]

_MIB: Final = 2**20
_KIB: Final = 2**10
_END_TIMEOUT_S: Final = 20.0


class Family:
    """A process of ours with all that it has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    @property
    def ended(self) -> bool:
        """True once the process itself is gone."""
        return self._process.poll() is not None

    def cpu_s(self) -> float:
        """CPU seconds of those that live."""
        return sum(_or_nothing(process_cpu_s, member) for member in self.members())

    def memory_mib(self) -> float:
        """The memory of those that live."""
        return sum(_or_nothing(_pss_bytes, member) for member in self.members()) / _MIB

    @contextlib.contextmanager
    def watched(self, every_s: float) -> Iterator[list[float]]:
        """A list that is given the memory again and again, until the end of the context."""
        seen: list[float] = []
        over = threading.Event()

        def watch() -> None:
            while not over.wait(every_s):
                seen.append(self.memory_mib())

        thread = threading.Thread(target=watch, name="memory", daemon=True)
        thread.start()
        try:
            yield seen
        finally:
            over.set()
            thread.join()
            seen.append(self.memory_mib())

    def stop(self) -> None:
        """End it and what it has started."""
        if self.ended:
            return
        members = self.members()
        self._process.terminate()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for child in psutil.wait_procs(members[1:], timeout=_END_TIMEOUT_S)[1]:
            child.kill()

    def members(self) -> list[psutil.Process]:
        """The process and its descendants that live."""
        try:
            parent = psutil.Process(self._process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


def _or_nothing(measure: Callable[[psutil.Process], float], member: psutil.Process) -> float:
    """What is measured of a process; 0 for one that is gone by now."""
    try:
        return measure(member)
    except (OSError, psutil.Error, ValueError):
        return 0.0


def _pss_bytes(member: psutil.Process) -> float:
    """The kernel's sum where it has one: the single mappings of a large process take long to read."""
    rollup = Path(f"/proc/{member.pid}/smaps_rollup")
    if not rollup.is_file():
        return float(member.memory_info().rss)
    line = next(line for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
    return float(line.split()[1]) * _KIB
