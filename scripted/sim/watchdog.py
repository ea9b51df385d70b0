"""The watchdog of the sim tier: a script that neither yields nor ends is stopped in the middle of what it does."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from scripted.errors import Overdue

__all__ = ["watchdog"]


@contextlib.contextmanager
def watchdog(timeout_s: float) -> Iterator[None]:
    """Raise Overdue in this thread after ``timeout_s`` seconds. Only the main thread can be watched; others are not."""
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def overdue(_signum: int, _frame: FrameType | None) -> None:
        raise Overdue(f"the script did not end within timeout_s={timeout_s}")

    before = signal.signal(signal.SIGALRM, overdue)
    signal.setitimer(signal.ITIMER_REAL, timeout_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
