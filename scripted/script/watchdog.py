"""The watchdog of one process: what neither yields nor ends is stopped in the middle of what it does."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import Final

from scripted.errors import Overdue

# A timer of 0 seconds would be none.
_LEAST_S: Final = 0.001


@contextlib.contextmanager
def watchdog(
    timeout_s: float, what: str = "the script did not end within timeout_s={:g}", *, is_busy: bool = False
) -> Iterator[None]:
    """Raise Overdue in this thread after ``timeout_s`` seconds. Only the main thread can be watched; others are not.

    ``is_busy``: what is watched computes all the time. If it hardly has by then, its process was stopped or starved: it
    gets the same time once more. A timer that runs already, such as that of pytest-timeout, goes on afterwards.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    was_starved = False

    def overdue(_signum: int, frame: FrameType | None) -> None:
        nonlocal was_starved
        if is_busy and not was_starved and time.process_time() - computed < timeout_s / 2:
            was_starved = True
            signal.setitimer(signal.ITIMER_REAL, timeout_s)
            return
        name, line = ("", 0) if frame is None else (frame.f_code.co_qualname, frame.f_lineno)
        raise Overdue(what.format(timeout_s, name=name, line=line))

    before, started, computed = signal.signal(signal.SIGALRM, overdue), time.monotonic(), time.process_time()
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(_LEAST_S, left_s - (time.monotonic() - started)), interval_s)
