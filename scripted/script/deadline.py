"""Bounds the seconds of a script in the process of its test, whatever it catches and whatever timers it sets.

The alarm of the watchdog comes first and says most. What survives it is struck from a thread until it has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Final, Self, TypeVar

from scripted.core.errors import Overdue
from scripted.core.installed import harness_folders

_Result = TypeVar("_Result")

# How much later than the alarm.
_PATIENCE_S: Final = 0.2
_INTERVAL_S: Final = 0.02
# Iterations within which a strike that is on its way arrives.
_SOON: Final = 1000
# Nothing else here uses it, and it ends a call that blocks.
_SIGNAL: Final = signal.SIGVTALRM
# What ends a script, and the harness, must not be struck itself.
_SPARED: Final = (contextlib.__file__, threading.__file__)


class Overrun(BaseException):
    """Ends a script whose time is over. What catches it meets another one in its first line."""

    def __init__(self) -> None:
        super().__init__()
        deadline = _of_threads.get(threading.get_ident())
        if deadline is not None:
            deadline.strike_each_line(sys._getframe(1))  # noqa: SLF001 - where it is raised


# The innermost one of each thread.
_of_threads: Final[dict[int, Deadline]] = {}


class Deadline:
    """The end of the time of one script, as a context manager around it; its code runs in ``run``."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._ends_at = time.monotonic() + timeout_s
        self._script_thread = threading.get_ident()
        self._is_main = threading.current_thread() is threading.main_thread()
        self._is_over = threading.Event()
        self._lock = threading.Lock()
        self._is_inside = False
        self._own_frame: FrameType | None = None
        self._tracer: Any = None
        self._is_armed = self._has_struck = False
        self._thread = threading.Thread(target=self._watch, name="scripted-deadline", daemon=True)

    def __enter__(self) -> Self:
        self._outer = _of_threads.get(self._script_thread)
        _of_threads[self._script_thread] = self
        if self._is_main:
            self._handler = signal.signal(_SIGNAL, self._on_signal)
        self._thread.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_over.set()
        self._thread.join()
        if self._outer is None:
            del _of_threads[self._script_thread]
        else:
            _of_threads[self._script_thread] = self._outer
        if self._is_main:
            signal.signal(_SIGNAL, self._handler)

    def run(self, code: Callable[[], _Result]) -> _Result:
        """Run code of the script. Raises Overdue when its time is over, in it or before it has returned."""
        self._own_frame, self._is_inside = sys._getframe(), True  # noqa: SLF001 - where frames of the script end
        try:
            try:
                result = code()
            except StopIteration:
                self._check_time()
                raise
            else:
                self._check_time()
                return result
            finally:
                self._leave()
        except Overrun as exc:
            while True:
                try:
                    self._leave()
                    break
                except Overrun:  # the last one, which was on its way
                    continue
            raise self._overdue().with_traceback(exc.__traceback__) from None

    def _check_time(self) -> None:
        if time.monotonic() > self._ends_at:
            raise self._overdue()

    def _overdue(self) -> Overdue:
        return Overdue(
            f"the script did not end within timeout_s={self._timeout_s:g}, and caught or switched off what ends it"
        )

    def _leave(self) -> None:
        """From here on nothing is struck any more, and what was on its way has arrived."""
        with self._lock:
            self._is_inside = False
            if self._is_armed:
                sys.settrace(self._tracer)
                self._is_armed = False
        if self._has_struck:
            # Python's own way to take it back, with NULL, would leave the interpreter asking for it for ever.
            with contextlib.suppress(Overrun):
                for _ in range(_SOON):
                    pass
            self._has_struck = False

    def _watch(self) -> None:
        if self._is_over.wait(max(0.0, self._ends_at - time.monotonic()) + _PATIENCE_S):
            return
        strikes = 0
        while not self._is_over.wait(_INTERVAL_S):
            with self._lock:
                if not self._is_inside:
                    continue
                strikes += 1
                if self._is_main:
                    signal.pthread_kill(self._script_thread, _SIGNAL)
                if not self._is_main or strikes % 2 == 0:  # the script may have a handler of its own
                    self._has_struck = True
                    _raise_in(self._script_thread, Overrun, None, None, None)

    def strike_each_line(self, frame: FrameType | None) -> None:
        """From here on, in the frames of the script: what an ``except`` or a ``finally`` runs is struck as well."""
        if not self._is_inside:
            return
        if not self._is_armed:
            self._is_armed = self._has_struck = True
            self._tracer = sys.gettrace()
        sys.settrace(_ignore_new_frames)  # Python takes it back when the strike falls inside of it
        while frame is not None and frame is not self._own_frame:
            if not frame.f_code.co_filename.startswith((*_SPARED, *harness_folders())):
                frame.f_trace = functools.partial(_raise_in, self._script_thread, Overrun)
            frame = frame.f_back

    def _on_signal(self, _signum: int, _frame: FrameType | None) -> None:
        if self._is_inside:
            raise Overrun


def _ignore_new_frames(_frame: FrameType, _event: str, _argument: Any) -> None:
    return None


# PyThreadState_SetAsyncExc raises an exception in a thread at its next instruction that allows it. It is the
# trace function too, because one in Python would be struck itself; what such a function
# is told, it ignores.
_raise_in: Final = ctypes.PYFUNCTYPE(None, ctypes.c_ulong, *4 * [ctypes.py_object])(
    ("PyThreadState_SetAsyncExc", ctypes.pythonapi)
)
