"""A hard deadline for code that a watchdog cannot interrupt: the kernel ends the process, with its stacks on stderr.

The watchdog raises an exception between two lines of Python, so a C call that never returns outlasts it. This is only
for scripts that run in their caller's process; a script in a child is killed by its parent.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import functools
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any, Final

# Libraries do not block it and Python does not catch it. A shell prints "Virtual timer expired".
DEADLINE_SIGNAL: Final = signal.SIGVTALRM
# CPU seconds of the thread beyond twice the watchdog's time: loading a model is unwatched but uses CPU.
_PATIENCE_S: Final = 60.0
_BY_SIGNAL: Final = 0
_LIBRARIES: Final = (None, "librt.so.1")
_STDERR: Final = 2
_output = _STDERR


class _SignalEvent(ctypes.Structure):
    """The kernel's ``struct sigevent``, 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("unused", ctypes.c_byte * 48),
    )


class _Moment(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _Setting(ctypes.Structure):
    _fields_ = (("interval", _Moment), ("first", _Moment))


def write_stacks_to(descriptor: int = _STDERR) -> None:
    """Write stacks to this descriptor: a test runner reads the process's own stderr and would lose them."""
    global _output
    _output = descriptor


@contextlib.contextmanager
def hard_deadline(timeout_s: float) -> Iterator[None]:
    """End this process if its main thread computes far longer than ``timeout_s`` inside the context.

    Counts only the CPU time of the thread, so a process that is stopped, starved or held in a debugger survives. Has no
    effect in other threads, which have no watchdog either, or on systems without per-thread CPU timers.
    """
    library = _library() if threading.current_thread() is threading.main_thread() else None
    if library is None:
        yield
        return
    if signal.getsignal(DEADLINE_SIGNAL) is signal.SIG_DFL:
        faulthandler.register(DEADLINE_SIGNAL, file=_output, chain=True)
    timer = ctypes.c_void_p()
    event = _SignalEvent(number=DEADLINE_SIGNAL, notify=_BY_SIGNAL)
    if library.timer_create(time.CLOCK_THREAD_CPUTIME_ID, ctypes.byref(event), ctypes.byref(timer)):
        yield
        return
    seconds, rest = divmod(2 * timeout_s + _PATIENCE_S, 1)
    setting = _Setting(first=_Moment(int(seconds), int(rest * 1e9)))
    library.timer_settime(timer, 0, ctypes.byref(setting), None)
    try:
        yield
    finally:
        library.timer_delete(timer)


@functools.cache
def _library() -> Any:
    """The C library with per-thread CPU timers; None if there is none."""
    for name in _LIBRARIES:
        with contextlib.suppress(OSError, AttributeError):
            library = ctypes.CDLL(name)
            library.timer_create, library.timer_settime, library.timer_delete  # noqa: B018
            return library
    return None
