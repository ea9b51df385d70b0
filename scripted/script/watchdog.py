"""The watchdog of one process: interrupts code that neither yields nor ends."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Final

from scripted.core.errors import Overdue

# A timer of 0 seconds would be none.
_LEAST_S: Final = 0.001
# Samples of the stack until one is in the code that owns the loop, and not in a function that it calls.
_LOOKS: Final = 20
_LOOK_EVERY_S: Final = 0.02
# Code that catches every Exception is interrupted again after this time.
_AGAIN_S: Final = 0.5
# A process that blocks for ever computes, or waits for a CPU, for less than this share of the time; a starved one does
# so for more, and gets this many extensions of its time.
_LEAST_SHARE: Final = 0.01
_TURNS_LIMIT: Final = 12


# CPU seconds that this process has spent in ``unwatched`` code.
_unwatched_s = 0.0


class Struck(BaseException):
    """Interrupts code that has caught Overdue."""


def _ran_or_waited_s() -> float:
    """Return the seconds that the main thread has run, or waited for a CPU to run on."""
    try:
        computed, waited, _ = Path("/proc/self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return time.process_time()
    return (int(computed) + int(waited)) / 1e9


def _watched_s() -> float:
    return time.process_time() - _unwatched_s


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Exclude work that a process does once, such as loading a model, from the time of any watchdog."""
    global _unwatched_s
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    started = time.process_time()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        yield
    finally:
        _unwatched_s += time.process_time() - started
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


@contextlib.contextmanager
def watchdog(
    timeout_s: float,
    what: str = "the script did not end within timeout_s={:g}",
    *,
    is_busy: bool = False,
    is_owner: Callable[[FrameType | None], bool] = lambda _: True,
) -> Iterator[Callable[[], bool]]:
    """Raise Overdue in this thread after ``timeout_s`` seconds. Only works in the main thread; no effect in others.

    Yields a function that returns whether Overdue was raised, because the watched code may have caught it.

    ``is_busy``: the watched code computes all the time. If it computed for less than half of the time, the process was
    stopped or starved: it gets the same time again, as long as it computes at all. Code that catches Overdue is
    interrupted again. Overdue is raised in a frame for which ``is_owner`` holds if sampling finds one. A timer that
    runs already, such as pytest-timeout's, continues afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield lambda: False
        return

    turns, ran_before, looks, said = 0, 0.0, 0, ""

    def overdue(_signum: int, frame: FrameType | None) -> None:
        nonlocal turns, ran_before, looks, said
        if said:
            raise Struck
        spent = _watched_s() - computed
        ran = _ran_or_waited_s()
        goes_on = not turns or ran - ran_before > _LEAST_SHARE * timeout_s
        if is_busy and spent < timeout_s / 2 and goes_on and turns < _TURNS_LIMIT:
            turns, ran_before = turns + 1, ran
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            return
        looks += 1
        if looks < _LOOKS and not is_owner(frame):
            signal.setitimer(signal.ITIMER_REAL, _LOOK_EVERY_S)
            return
        said = what.format(timeout_s, name="" if frame is None else frame.f_code.co_qualname)
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_S, _AGAIN_S)
        raise Overdue(said)

    before, started, computed = signal.signal(signal.SIGALRM, overdue), time.monotonic(), _watched_s()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield lambda: bool(said)
    except Struck as exc:
        raise Overdue(said).with_traceback(exc.__traceback__) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(_LEAST_S, left_s - (time.monotonic() - started)), interval_s)
