"""Runs one pytest process over several registered files: watches its deadlines, and stops it with stacks.

Owns the process and its descendants until they are gone. Waits only on events and exits, never by polling.
"""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import msgspec
import psutil

from ci.events import STACKS_SIGNAL, Event, decode
from ci.results import FileResult
from ci.tally import Tally
from lockstep.documents import DocumentError

STACKS_TIMEOUT_S = 5.0  # From the request for stacks to the kill.
DRAIN_TIMEOUT_S = 2.0  # From the exit of pytest to the end of its events.
INTERRUPT_TIMEOUT_S = 10.0  # From Ctrl-C to the kill: servers are stopped in between.
STACKS_MAX_CHARS = 60_000


@dataclass(frozen=True)
class SessionOptions:
    """A session's options: seconds per file, node ids that narrow a file, and arguments for pytest."""

    root: Path
    timeout_s: float
    repeat: int = 1
    stop_on_failure: bool = False
    nodes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    pytest_args: tuple[str, ...] = ()


class PytestExited(msgspec.Struct, frozen=True):
    """The end of the process, with its return code; a negative code is a signal, as in `subprocess`."""

    code: int


class EventsDrained(msgspec.Struct, frozen=True):
    """The end of the events."""


def run_session(paths: Sequence[str], options: SessionOptions) -> dict[str, FileResult]:
    """Run pytest over the files (relative to the root) and return a result for each."""
    with tempfile.TemporaryDirectory(prefix="ci-stacks-") as folder:
        read_fd, write_fd = os.pipe()
        try:
            process = subprocess.Popen(  # noqa: S603 (an argument list of our own, no shell)
                _command(paths, options, write_fd, Path(folder)),
                cwd=options.root,
                pass_fds=(write_fd,),
                start_new_session=True,
            )
        finally:
            os.close(write_fd)
        try:
            return _watch(process, os.fdopen(read_fd, "rb"), Tally(paths, options.timeout_s, _now()), Path(folder))
        finally:
            _kill_group(process)


def _command(paths: Sequence[str], options: SessionOptions, events_fd: int, stacks: Path) -> list[str]:
    own = ["-p", "ci.probe", f"--ci-events-fd={events_fd}", f"--ci-stacks={stacks}", f"--ci-repeat={options.repeat}"]
    own += ["--ci-stop"] if options.stop_on_failure else []
    rest = [f"--rootdir={options.root}", "--continue-on-collection-errors", *options.pytest_args]
    targets = [f"{path}::{node}" if node else path for path in paths for node in options.nodes.get(path, ("",))]
    return [sys.executable, "-m", "pytest", *own, *rest, *targets]


def _watch(process: subprocess.Popen[bytes], stream: BinaryIO, tally: Tally, stacks: Path) -> dict[str, FileResult]:
    inbox: queue.SimpleQueue[Event | PytestExited | EventsDrained] = queue.SimpleQueue()
    threading.Thread(target=read_events, args=(stream, inbox), daemon=True).start()
    threading.Thread(target=lambda: inbox.put(PytestExited(process.wait())), daemon=True).start()
    code: int | None = None
    has_begun = False
    drain_deadline = float("inf")
    while True:
        try:
            message = inbox.get(timeout=max(0.0, min(tally.deadline, drain_deadline) - _now()))
        except queue.Empty:
            if code is not None:  # a descendant keeps the pipe open; pytest has sent all its events
                return tally.exited(code)
            return tally.late(_now(), _stop_with_stacks(process, stacks))
        except KeyboardInterrupt:
            # During its imports, pytest has nothing to end and would only print a traceback.
            if has_begun:
                _interrupt(process)
            raise
        if isinstance(message, PytestExited):
            code, drain_deadline = message.code, _now() + DRAIN_TIMEOUT_S
        elif isinstance(message, EventsDrained):
            return tally.exited(process.wait() if code is None else code)
        else:
            has_begun = True
            tally.apply(message, _now())


def read_events(stream: BinaryIO, inbox: queue.SimpleQueue[Event | PytestExited | EventsDrained]) -> None:
    with stream:
        for line in stream:
            try:
                inbox.put(decode(line))
            except DocumentError as exc:
                # Probably half a line from a writer that was killed.
                sys.stderr.write(f"left out a line of {len(line)} bytes that is not an event of pytest: {exc}\n")
    inbox.put(EventsDrained())


def _stop_with_stacks(process: subprocess.Popen[bytes], folder: Path) -> str:
    """Ask every process of the tree for its stacks, which also ends it; return them by process id."""
    family = _family(process.pid)
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.send_signal(STACKS_SIGNAL)
    psutil.wait_procs(family, timeout=STACKS_TIMEOUT_S)
    _kill(family)
    texts = [f"process {file.stem}:\n{file.read_text(errors='replace')}" for file in sorted(folder.glob("*.txt"))]
    return "\n".join(texts)[:STACKS_MAX_CHARS] or "(the process wrote none: it had not loaded the probe yet)"


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(INTERRUPT_TIMEOUT_S)


def _family(pid: int) -> list[psutil.Process]:
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and all descendants in its session's group."""
    _kill(_family(process.pid))
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _kill(family: list[psutil.Process]) -> None:
    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()


def _now() -> float:
    return time.monotonic()
