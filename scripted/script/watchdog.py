"""The watchdog of one process: what neither yields nor ends is stopped in the middle of what it does."""

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
# A loop is in the code that it belongs to at one of so many looks, and between them in what that code asked.
_LOOKS: Final = 20
_LOOK_EVERY_S: Final = 0.02
# What catches every Exception is struck again so much later.
_AGAIN_S: Final = 0.5
# What waits for ever computes, or waits for a processor, for less than this share of the time; a starved process does
# for more, and it gets so many turns.
_LEAST_SHARE: Final = 0.01
_TURNS_LIMIT: Final = 12


# How long this process has computed in what nobody watches, in seconds.
_unwatched_s = 0.0


class Struck(BaseException):
    """The second strike."""


def _ran_or_waited_s() -> float:
    """How long the main thread has computed, or has waited for a processor to compute on, in seconds."""
    try:
        computed, waited, _ = Path("/proc/self/schedstat").read_text(encoding="ascii").split()
    except (OSError, ValueError):
        return time.process_time()
    return (int(computed) + int(waited)) / 1e9


def _watched_s() -> float:
    return time.process_time() - _unwatched_s


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """What is made once in a process, however long that takes, is in no watchdog's time."""
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
    is_meant: Callable[[FrameType | None], bool] = lambda _: True,
) -> Iterator[Callable[[], bool]]:
    """Raise Overdue in this thread after ``timeout_s`` seconds. Only the main thread can be watched; others are not.

    Yields a function that says whether it has been raised: the code under it may have caught it.

    ``is_busy``: what is watched computes all the time. If it has not for half of the time, its process was stopped or
    starved: it gets the same time once more, and again while it computes at all; and what catches Overdue is struck
    again. A place that ``is_meant`` is looked for before any other. A timer that runs already, such as that of
    pytest-timeout, goes on afterwards.
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
        if looks < _LOOKS and not is_meant(frame):
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
