"""The watchdog of one process: interrupts code that neither yields nor ends."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from scripted.core.errors import Overdue

# A timer of 0 seconds would never fire.
_LEAST_S: Final = 0.001
# How often the stack is sampled to find it in the code that owns the loop rather than in a function it calls.
_LOOKS: Final = 20
_LOOK_EVERY_S: Final = 0.02
# Code that catches every Exception is interrupted again after this time.
_AGAIN_S: Final = 0.5
# A deadlocked process computes, or waits for a CPU, for less than this share of the time. A starved one does so for
# more, and gets this many extensions.
_LEAST_SHARE: Final = 0.01
_TURNS_LIMIT: Final = 12
# The place of the user time among the fields of /proc/PID/stat that follow the name; the system time is next.
_UTIME: Final = 11


# CPU seconds that this process has spent in ``unwatched`` code.
_unwatched_s = 0.0


class Struck(BaseException):
    """Interrupts code that has caught Overdue."""


def cpu_s_of(pid: int) -> float:
    """Return how many seconds a process has computed; 0 for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[_UTIME]) + int(fields[_UTIME + 1])) / os.sysconf("SC_CLK_TCK")


def ran_or_waited_s(pid: int) -> float:
    """Return how many seconds the main thread of a process has run, or waited for a CPU to run on."""
    try:
        computed, waited, _ = Path(f"/proc/{pid}/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return cpu_s_of(pid)
    return (int(computed) + int(waited)) / 1e9


def _ran_or_waited_s() -> float:
    return ran_or_waited_s(os.getpid())


def _watched_s() -> float:
    return time.process_time() - _unwatched_s


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Exclude one-time work of a process, such as loading a model, from the time of any watchdog."""
    global _unwatched_s
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    started = time.process_time()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        _unwatched_s += time.process_time() - started
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


class Patience:
    """Tells a process that was stopped or starved from one that has used up its time.

    ``computed`` returns the seconds of CPU time that count, ``ran`` those in which the process ran or wanted to run.
    """

    def __init__(self, timeout_s: float, computed: Callable[[], float], ran: Callable[[], float]) -> None:
        self._timeout_s = timeout_s
        self._computed = computed
        self._ran = ran
        self._computed_before = computed()
        self._ran_before = 0.0
        self._turns = 0

    def is_left(self) -> bool:
        """Return whether the process computed, but for less than half the time; if so, count the extension."""
        if self._turns >= _TURNS_LIMIT:
            return False
        ran = self._ran()
        goes_on = not self._turns or ran - self._ran_before > _LEAST_SHARE * self._timeout_s
        if not goes_on or self._computed() - self._computed_before >= self._timeout_s / 2:
            return False
        self._turns, self._ran_before = self._turns + 1, ran
        return True


class _Watch:
    """The state of one watchdog between its signals. ``said`` is the text of its Overdue, empty until then."""

    def __init__(
        self, timeout_s: float, what: str, is_busy: bool, is_owner: Callable[[FrameType | None], bool]
    ) -> None:
        self.said = ""
        self._timeout_s = timeout_s
        self._what = what
        self._is_owner = is_owner
        self._patience = Patience(timeout_s, _watched_s, _ran_or_waited_s) if is_busy else None
        self._looks = 0

    def strike(self, _signum: int, frame: FrameType | None) -> None:
        """Handle the timer's signal: set the timer again, or raise."""
        if self.said:
            raise Struck
        if self._patience is not None and self._patience.is_left():
            signal.setitimer(signal.ITIMER_REAL, self._timeout_s)
            return
        self._looks += 1
        if self._looks < _LOOKS and not self._is_owner(frame):
            signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY_S)
            return
        self.said = self._what.format(self._timeout_s, name="" if frame is None else frame.f_code.co_qualname)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        raise Overdue(self.said)


@contextlib.contextmanager
def watchdog(
    timeout_s: float,
    what: str = "the script did not end within timeout_s={:g}",
    *,
    is_busy: bool = False,
    is_owner: Callable[[FrameType | None], bool] = lambda _: True,
) -> Iterator[Callable[[], bool]]:
    """Raise Overdue in this thread after ``timeout_s`` seconds. Works in the main thread only; no effect in others.

    Yields a function that returns whether Overdue was raised, because the watched code may have caught it.

    ``is_busy``: the watched code computes all the time. If it computed for less than half of the time, the process was
    stopped or starved: it gets the same time again, as long as it computes at all. Code that catches Overdue is
    interrupted again. Overdue is raised in a frame for which ``is_owner`` holds if sampling finds one. A timer that was
    already running, such as pytest-timeout's, continues afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return

    watch = _Watch(timeout_s, what, is_busy, is_owner)
    before, started = signal.signal(signal.SIGALRM, watch.strike), time.monotonic()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield lambda: bool(watch.said)
    except Struck as exc:
        raise Overdue(watch.said).with_traceback(exc.__traceback__) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(_LEAST_S, left_s - (time.monotonic() - started)), interval_s)
