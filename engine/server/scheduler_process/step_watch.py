"""The time that a microbatch may take when the model runs in this process: then the process says so and ends.

Owns one thread, which sleeps while nothing is computed. A forward that never gives back the interpreter's lock is not
seen here.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

EXIT_STUCK: Final = 1

TellStuck = Callable[[str], None]


class StepWatch:
    """Watches the thread that computes. ``tell`` is called with what is known, from another thread, before the end."""

    def __init__(self, tell: TellStuck) -> None:
        self._tell = tell
        self._due: float | None = None
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None
        self._computing_thread = 0

    @contextmanager
    def computing(self, limit_s: float | None) -> Iterator[None]:
        """What is inside must end within the limit, if there is one. The watch is woken once a busy period."""
        if limit_s is None:
            yield
            return
        self._due = time.monotonic() + limit_s
        if not self._begun.is_set():
            self._wake()
        try:
            yield
        finally:
            self._due = None

    def _wake(self) -> None:
        self._begun.set()
        if self._thread is None:
            self._computing_thread = threading.get_ident()
            self._thread = threading.Thread(target=self._watch, name="step-watch", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        while True:
            due = self._due
            if due is None:
                # Nothing is computed: asleep until something is. What began after the look above is seen by the next.
                self._begun.clear()
                if self._due is None:
                    self._begun.wait()
                continue
            left_s = due - time.monotonic()
            if left_s > 0:
                time.sleep(left_s)
            elif due == self._due:
                self._end()

    def _end(self) -> None:
        frame = sys._current_frames().get(self._computing_thread)  # noqa: SLF001 - the one way to another thread's frames
        where = "".join(traceback.format_stack(frame)) if frame is not None else "it is not known where"
        self._tell(where)
        os._exit(EXIT_STUCK)
