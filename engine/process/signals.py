"""Signals on a file descriptor, which is readable when the user asks for a stop or a child changes state.

Owns the supervisor's handlers while it runs, and restores the previous ones.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from types import FrameType
from typing import Self

# The signal at which a process of the engine prints its stacks.
STACK_SIGNAL = signal.SIGUSR1
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
MAX_PENDING_SIGNALS = 64


def leave_stops_to_the_supervisor() -> None:
    """Ignore the signals that ask for a stop: the supervisor passes the stop on, or kills this process.

    Ctrl-C, a closed terminal or a service manager sends such a signal to the whole process group. A front end that
    ended at once would cut the streams that the supervisor drains.
    """
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


class SignalWatch:
    """Turns signals into bytes on a socket; the handlers do nothing, so no code is interrupted.

    In addition to the ``end`` signals it watches SIGCHLD: a child ended, was stopped or continued.
    """

    def __init__(self, end: Sequence[signal.Signals] = STOP_SIGNALS) -> None:
        self._end = end

    def __enter__(self) -> Self:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._former_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        # Under nohup a hangup stays ignored, as intended.
        hangup_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        asked = [number for number in self._end if not (hangup_ignored and number is signal.SIGHUP)]
        watched = [*asked, signal.SIGCHLD]
        self._former = {number: signal.signal(number, _note) for number in watched}
        # A process started by a thread that blocks signals, as Ray's do, would never see them.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, watched)
        return self

    def __exit__(self, *raised: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._former_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        return self._reader.fileno()

    def take(self) -> list[int]:
        """Return the numbers of the signals since the last call."""
        try:
            return list(self._reader.recv(MAX_PENDING_SIGNALS))
        except BlockingIOError:
            return []


def _note(number: int, frame: FrameType | None) -> None:
    """Do nothing: Python writes the wake-up byte only for signals that have a handler."""
