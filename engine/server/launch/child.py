"""One process of the engine: forked here, watched through its control pipe, reaped here.

Owns the first acts of every process (close inherited files, leave signals to the supervisor, die with it) and its last
(report the cause of its death). Knows nothing of what the processes do.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import Pipe, current_process
from multiprocessing.connection import Connection

import msgspec

from engine.core.frames import BadFrameError
from engine.process.control import (
    MAX_CONTROL_BYTES,
    ChildMessage,
    Control,
    Dying,
    SupervisorMessage,
    decode_child_message,
)
from engine.process.death import EXIT_FAILED
from engine.process.inheritance import close_inherited_files, take_no_input
from engine.process.signals import STACK_SIGNAL, leave_stops_to_the_supervisor
from engine.process.watched import WatchedProcess
from lockstep.process_control import die_with_parent, name_process

ChildMain = Callable[[Control], None]


logger = logging.getLogger(__name__)


class Child(WatchedProcess):
    def __init__(self, name: str, pid: int, connection: Connection) -> None:
        super().__init__(name, pid)
        self._connection = connection

    def fileno(self) -> int:
        return self._connection.fileno()

    def send(self, message: SupervisorMessage) -> None:
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(message))
        except OSError:
            return

    def listen(self) -> ChildMessage | None:
        """Read one message, or reap the process when its pipe has closed. Call it when ``fileno()`` is readable."""
        try:
            message = decode_child_message(self._connection.recv_bytes(MAX_CONTROL_BYTES))
        except BadFrameError as exc:
            logger.warning("dropped an undecodable message of the %s process: %s", self.name, exc)
        except (EOFError, ConnectionError):
            # Only the process itself has the other end, so it is exiting and can be reaped in a moment.
            self.reap(wait=True)
        except OSError as exc:
            # A frame longer than any message: nothing more can be read from the pipe, not even the process's end.
            self.end(f"its control pipe broke: {exc}")
            self.reap(wait=True)
        else:
            self._take(message)
            return message
        return None

    def look_for_stop(self) -> None:
        if not self.alive:
            return
        try:
            # WNOWAIT leaves an exit to be reaped, and a stop to be reported again.
            stopped = os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:
            stopped = False  # It was reaped already.
        if not stopped:
            self.stopped_since = None
        elif self.stopped_since is None:
            self.stopped_since = time.monotonic()

    def end(self, why: str) -> None:
        self.dying = self.dying or Dying(error=why, traceback="", expected=True)
        self.signal(signal.SIGKILL)

    def signal(self, number: signal.Signals) -> None:
        if self.alive:
            os.kill(self.pid, number)

    def close(self) -> None:
        self._connection.close()

    def reap(self, *, wait: bool = False) -> bool:
        """Record the exit status if the process has ended, and return whether it has. ``wait`` blocks until it does."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, 0 if wait else os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if pid else None
        return self.status is not None


def fork_child(name: str, main: ChildMain, *, keep: Sequence[int] = (), outlives_supervisor: bool = False) -> Child:
    """Fork a process that runs ``main`` and exits. It keeps its control pipe and the file descriptors in ``keep``.

    With ``outlives_supervisor`` the kernel does not kill it with the supervisor: it still has a final message for
    clients, and the end of its pipe tells it about the supervisor's death.
    """
    ours, theirs = Pipe(duplex=True)
    supervisor_pid = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        close_inherited_files([theirs.fileno(), *keep])
        _prepare(name, supervisor_pid, outlives_supervisor)
        _run(main, Control(theirs))
    theirs.close()
    return Child(name, pid, ours)


def _prepare(name: str, supervisor_pid: int, outlives_supervisor: bool) -> None:
    current_process().name = name
    take_no_input()
    signal.set_wakeup_fd(-1)
    leave_stops_to_the_supervisor()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # `kill -USR1 PID` makes a hanging process write its stacks to stderr, even inside a system call.
    faulthandler.register(STACK_SIGNAL, all_threads=True)
    if not outlives_supervisor:
        die_with_parent(supervisor_pid, signal.SIGKILL)
    name_process(name)


def _run(main: ChildMain, control: Control) -> None:
    """Run ``main`` and exit; never returns, so that no frame of the supervisor's stack runs twice."""
    status = 0
    try:
        main(control)
    except BaseException as exc:  # noqa: BLE001 - any exception that ends this process is reported as the cause
        control.report_death(exc)
        status = EXIT_FAILED
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
