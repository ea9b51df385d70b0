"""Continues a script whose scheduler was killed: a copy of its process, with the connections of its clients.

The copy receives the front end's answers to the clients, runs the script to its end, leaves the result in a file, and
ends. It runs no step and sends no message of the engine.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Final, NoReturn

import psutil

from engine.core.messages import encode
from engine.process.control import Control
from lockstep.whole_file import write_whole
from scripted.script.wire import ScriptFailedReply
from scripted_lockstep.script.execution import ScriptSucceeded
from scripted_lockstep.tiers.server.wire import decode_replies

_PID: Final = "survivor"
_RESULT: Final = "survivor-result"
_INTERVAL_S: Final = 0.005
# The copy ends by this time, with or without a result.
_END_TIMEOUT_S: Final = 10.0
_ASSUMED_LIFE_S: Final = 120


def survive(private_dir: Path, control: Control) -> None:
    """Copy this process, kill the original, and return in the copy, which ends by itself after two minutes.

    Only the original has ``control``: the supervisor sees the death when it closes.
    """
    original = os.getpid()
    if os.fork():
        # Its descriptors stay open until it is dead, so that nobody sees the death earlier.
        while True:
            signal.pause()
    signal.alarm(_ASSUMED_LIFE_S)
    control.close()
    (private_dir / _PID).write_text(str(os.getpid()), encoding="ascii")
    os.kill(original, signal.SIGKILL)


def leave_result(private_dir: Path, reply: ScriptSucceeded | ScriptFailedReply) -> NoReturn:
    """Write the result of the script and end this process. Nothing is closed: the original owned the descriptors."""
    write_whole(private_dir / _RESULT, encode(reply))
    os._exit(0)


def result_of_survivor(private_dir: Path, timeout_s: float) -> ScriptSucceeded | ScriptFailedReply | None:
    """Wait for the result of a copy and for its end; None without a copy or a result.

    Raises BadFrameError for a file without a result.
    """
    try:
        pid = int((private_dir / _PID).read_text(encoding="ascii"))
    except FileNotFoundError:
        return None
    _wait_for_end(pid, timeout_s)
    with contextlib.suppress(FileNotFoundError):
        reply = decode_replies((private_dir / _RESULT).read_bytes())
        return reply if isinstance(reply, ScriptSucceeded | ScriptFailedReply) else None
    return None


def _wait_for_end(pid: int, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s + _END_TIMEOUT_S
    while _is_alive(pid):
        if time.monotonic() > deadline:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            return
        time.sleep(_INTERVAL_S)


def _is_alive(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
