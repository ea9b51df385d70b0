"""The time limit of a microbatch if the model runs in this process, which past the limit reports that and exits.

Owns one thread, which sleeps while nothing is computed. Cannot notice a forward pass that never releases the
interpreter lock.
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


class StepWatch:
    """Watches the computing thread. At the limit a second thread calls ``report`` with the stack and exits the
    process.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._due: float | None = None
        self._begun = threading.Event()
        self._thread: threading.Thread | None = None
        self._computing_thread = 0

    @contextmanager
    def computing(self, limit_s: float | None) -> Iterator[None]:
        """Require the block to end within the limit, if any. Wakes the watch once in a busy period."""
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
                # Sleep until a computation begins. The second read sees one that began after the first.
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
        frame = sys._current_frames().get(self._computing_thread)  # noqa: SLF001 - the only way to another thread's frames
        where = "".join(traceback.format_stack(frame)) if frame is not None else "an unknown place"
        self._report(where)
        os._exit(EXIT_STUCK)
