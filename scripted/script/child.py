"""Runs a function in a forked child: its result returns over a pipe, and no other effect of it survives.

The parent keeps the time, and always kills the child and every process that the child started.
"""

from __future__ import annotations

import bdb
import builtins
import contextlib
import faulthandler
import gc
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from pathlib import Path
from types import FrameType
from typing import Any, Final, NoReturn

from lockstep.process_control import adopt_orphans, die_with_parent
from scripted.script.handled_signals import is_handling
from scripted.script.watchdog import Patience, cpu_s_of, ran_or_waited_s

# On this signal the child writes its stacks, even inside a C call.
_SHOW_STACKS: Final = signal.SIGUSR2
_STACKS_WITHIN_S: Final = 5.0
_LOOK_EVERY_S: Final = 0.01
# The first byte of a message: a result follows, or the traceback of an exception; or a debugger has started and may
# wait for its user forever.
_RESULT: Final = b"r"
_RAISED: Final = b"x"
_DEBUGS: Final = b"d"
_DEBUGGER: Final = bdb.__file__


class ChildLate(Exception):
    """The child ran out of time and was killed. ``stacks`` are its Python stacks; empty if it wrote none."""

    def __init__(self, stacks: str) -> None:
        super().__init__("the child was late")
        self.stacks = stacks


class ChildDied(Exception):
    """The child ended without a result.

    ``traceback`` is that of its exception, after a line break; empty if it raised none.
    """

    def __init__(self, status: int, traceback: str = "") -> None:
        code = os.waitstatus_to_exitcode(status)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"left with status {code}"
        lines = traceback.strip().splitlines()
        super().__init__(f"raised {lines[-1]}" if lines else how)
        self.traceback = f"\n{traceback}" if lines else ""


def run_in_child(work: Callable[[], bytes], timeout_s: float, *, is_busy: bool = False) -> bytes:
    """Run ``work`` in a forked child and return its result. A child that ``is_busy`` computes all the time.

    Raises ChildLate after ``timeout_s`` seconds, unless a debugger runs in it or a busy child was starved, and
    ChildDied.
    """
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()  # otherwise both processes would write the rest of the buffer
    reader, writer = Pipe(duplex=False)
    stacks = os.memfd_create("stacks")
    parent = os.getpid()
    before = set(children_of(parent))
    adopt_orphans()  # processes that outlive the child become children of this one
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # forking with threads: the child never joins them
            child = os.fork()
        if not child:
            _be_child(work, writer, stacks, parent)
        writer.close()
        try:
            patience = Patience(timeout_s, lambda: cpu_s_of(child), lambda: ran_or_waited_s(child)) if is_busy else None
            message = _await_message(reader, child, stacks, timeout_s, patience)
        finally:
            status = _end(child, before)
        if message[:1] != _RESULT:
            raise ChildDied(status, message[1:].decode("utf-8", "replace"))
        return message[1:]
    finally:
        adopt_orphans(adopt=False)
        reader.close()
        os.close(stacks)


# -- in the parent --


def _await_message(reader: Connection, child: int, stacks: int, timeout_s: float, patience: Patience | None) -> bytes:
    """Wait for the result or the traceback; empty if the child ends without one."""
    handler: Any = None
    left_s: float | None = timeout_s
    death = os.pidfd_open(child)
    try:
        while True:
            if not wait([reader, death], left_s):
                if patience is None or not patience.is_left():
                    break
                continue
            if not reader.poll():
                return b""
            try:
                message = reader.recv_bytes()
            except EOFError:
                return b""
            if message != _DEBUGS:
                return message
            left_s = None
            if handler is None and threading.current_thread() is threading.main_thread():
                handler = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the debugger
    finally:
        os.close(death)
        if handler is not None:
            signal.signal(signal.SIGINT, handler)
    raise ChildLate(_stacks_of(child, stacks))


def _stacks_of(child: int, stacks: int) -> str:
    os.kill(child, _SHOW_STACKS)
    deadline = time.monotonic() + _STACKS_WITHIN_S
    while not os.fstat(stacks).st_size or is_handling(child, _SHOW_STACKS):
        if time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    return os.pread(stacks, os.fstat(stacks).st_size, 0).decode("utf-8", "replace")


def _end(child: int, before: set[int]) -> int:
    """Kill the child, then the processes that it leaves, which this process adopts. Returns the child's status."""
    os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    while left := set(children_of(os.getpid())) - before:
        for one in left:
            os.kill(one, signal.SIGKILL)
            os.waitpid(one, 0)
    return status


def children_of(process: int) -> Iterator[int]:
    """Yield the child processes that a process has not waited for, adopted ones included."""
    for task in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread that has ended
            yield from map(int, task.read_text(encoding="ascii").split())


# -- in the child --


def _be_child(work: Callable[[], bytes], writer: Connection, stacks: int, parent: int) -> NoReturn:
    """Send the result of ``work`` and wait to be killed. A process that ``work`` forked exits here."""
    child = os.getpid()
    try:
        die_with_parent(parent, signal.SIGKILL)
        os.setpgid(0, 0)
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # lets a background group write to the terminal
        gc.freeze()  # a collection would touch, and so copy, the pages of all objects of the parent
        faulthandler.register(_SHOW_STACKS, file=stacks, all_threads=True)
        sys.addaudithook(_watch_for_debuggers(writer, child))
        builtin = vars(builtins).copy()
        result = work()
        vars(builtins).update(builtin)  # the script may have replaced builtins that the code below calls
        if os.getpid() == child:
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(Exception):
                    stream.flush()
            writer.send_bytes(_RESULT + result)
            while True:
                signal.pause()
    except BaseException:  # noqa: BLE001 - the child must not continue the parent's work
        # Not printed: the script may have redirected, closed or silenced its output.
        with contextlib.suppress(BaseException):
            if os.getpid() == child:
                writer.send_bytes(_RAISED + traceback.format_exc().encode("utf-8", "replace"))
    finally:
        os._exit(1)


def _watch_for_debuggers(writer: Connection, child: int) -> Callable[[str, tuple[object, ...]], None]:
    """Tell the parent when a debugger starts. An audit hook adds no frame at the line where a debugger stops."""

    def hook(event: str, _arguments: tuple[object, ...]) -> None:
        is_debugger = event == "builtins.breakpoint" or (
            event == "sys.settrace" and _is_in_debugger(sys._getframe(1))  # noqa: SLF001 - the caller's frame
        )
        if is_debugger and os.getpid() == child:
            signal.setitimer(signal.ITIMER_REAL, 0)
            os.setpgid(0, os.getpgid(os.getppid()))  # the parent's group may read from the terminal
            writer.send_bytes(_DEBUGS)

    return hook


def _is_in_debugger(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename == _DEBUGGER
