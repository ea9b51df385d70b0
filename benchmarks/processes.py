"""Processes that a benchmark starts as users do: CPU and memory of each with its descendants, and its end.

Memory is the proportional share (PSS), so that shared pages of forked processes count once.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx
import psutil

from lockstep.process_control import die_with_parent

__all__ = ["Family", "engine_process", "free_port", "process_cpu_s"]

_MIB: Final = 2**20
_KIB: Final = 2**10
_START_S: Final = 180.0
_END_S: Final = 30.0
_LOOK_INTERVAL_S: Final = 0.05
_LOOK_TIMEOUT_S: Final = 2.0
_LOG_LINES: Final = 40


class Family:
    """One of our processes with its descendants. It writes into ``log``, or to our stderr."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        cores: Collection[int] = (),
        **more: Any,
    ) -> None:
        self._log = log
        ours = os.sched_getaffinity(0)
        with contextlib.ExitStack() as stack:
            output = None if log is None else stack.enter_context(log.open("wb"))
            os.sched_setaffinity(0, cores or ours)
            stack.callback(os.sched_setaffinity, 0, ours)
            pipes = {"stdout": output or subprocess.DEVNULL, "stderr": output} | more
            self.process: subprocess.Popen[Any] = subprocess.Popen(  # noqa: S603 - our own commands, in the user's environments
                command,
                env={**os.environ, **(environment or {})},
                preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
                **pipes,
            )

    def said(self) -> str:
        """Return the end of its log."""
        lines = [] if self._log is None else self._log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:]) or "its log above says why"

    def wait_for(self, url: str, within_s: float = _START_S) -> None:
        """Wait until the server there is healthy. Raises SystemExit if that takes too long."""
        deadline = time.monotonic() + within_s
        # One client for all polls: each new one would load certificates, which takes half a core from the server.
        with httpx.Client(base_url=url, timeout=_LOOK_TIMEOUT_S, trust_env=False) as client:
            while not _answers(client):
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(f"error: {url} must serve within {within_s:g} s, but does not:\n{self.said()}")
                time.sleep(_LOOK_INTERVAL_S)

    def cpu_s(self) -> float:
        """Return the CPU seconds of its live processes."""
        return sum(_or_nothing(process_cpu_s, member) for member in self.members())

    def memory_mib(self) -> float:
        """Return the memory of its live processes."""
        return sum(_or_nothing(_pss_bytes, member) for member in self.members()) / _MIB

    @contextlib.contextmanager
    def watched(self, every_s: float) -> Iterator[list[float]]:
        """Yield a list to which the memory is appended periodically while the context is open."""
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
        """End it and its descendants, gently at first."""
        members = self.members()
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for child in psutil.wait_procs(members[1:], timeout=_END_S)[1]:
            child.kill()

    def members(self) -> list[psutil.Process]:
        """Return the process and its live descendants."""
        try:
            parent = psutil.Process(self.process.pid)
            return [parent, *parent.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []


@contextlib.contextmanager
def engine_process(*words: str, cores: Collection[int] = (), threads: int = 1) -> Iterator[Family]:
    """Run a command of the engine, on only these cores if any are given, and end it gently."""
    variables = {"ENGINE_LOG_REQUESTS": "0", "OMP_NUM_THREADS": str(threads)}
    family = Family([sys.executable, "-m", "engine", *words], environment=variables, cores=cores)
    try:
        yield family
    finally:
        family.stop()


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def process_cpu_s(process: psutil.Process) -> float:
    """Return the CPU seconds of all threads to the nanosecond; the usual counters have ticks of 10 ms."""
    tasks = Path(f"/proc/{process.pid}/task").iterdir()
    return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9


def _answers(client: httpx.Client) -> bool:
    try:
        return client.get("/health").is_success
    except httpx.TransportError:
        return False


def _or_nothing(measure: Callable[[psutil.Process], float], member: psutil.Process) -> float:
    """Measure a process; 0 for one that is gone."""
    try:
        return measure(member)
    except (OSError, psutil.Error, ValueError):
        return 0.0


def _pss_bytes(member: psutil.Process) -> float:
    """Return the kernel's sum if it has one: reading each mapping of a large process takes long."""
    rollup = Path(f"/proc/{member.pid}/smaps_rollup")
    if not rollup.is_file():
        return float(member.memory_info().rss)
    line = next(line for line in rollup.read_text().splitlines() if line.startswith("Pss:"))
    return float(line.split()[1]) * _KIB
