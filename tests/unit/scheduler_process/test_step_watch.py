"""The watch over a forward pass in this process: an overdue one is reported with its stack; idleness costs nothing."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import time
from pathlib import Path

from engine.server.scheduler_process.step_watch import StepWatch

# A step of a millisecond takes no longer than that on a busy machine.
LIMIT_S = 1.0

STUCK = """
import sys, time
from engine.server.scheduler_process.step_watch import StepWatch

def never_returns():
    time.sleep(60)

watch = StepWatch(lambda where: print(where, flush=True))
for _ in range(3):
    with watch.computing(0.5):
        pass
with watch.computing(0.5):
    never_returns()
"""


def test_what_is_stuck_is_told_with_its_place_and_ended() -> None:
    """A failure stays alone and never ends the process (A05).

    A dead or late stage ends every stream with an error (A06).
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(STUCK)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 1
    assert "in never_returns" in done.stdout


def test_what_ends_in_time_is_left_alone_and_idleness_wakes_nothing() -> None:
    """A01: after the last step the watch wakes once, and then no more."""
    told: list[str] = []
    watch = StepWatch(told.append)
    for _ in range(50):
        with watch.computing(LIMIT_S):
            time.sleep(0.001)
    thread = watch._thread
    assert thread is not None
    deadline = time.monotonic() + 20 * LIMIT_S
    while watch._begun.is_set() or not _status(thread.native_id, "State").endswith("(sleeping)"):
        assert time.monotonic() < deadline, "the watch does not fall asleep"
        time.sleep(0.01)
    before = _status(thread.native_id, "voluntary_ctxt_switches")
    time.sleep(2 * LIMIT_S)
    assert _status(thread.native_id, "voluntary_ctxt_switches") == before
    assert told == []


def test_without_a_limit_there_is_no_watch() -> None:
    watch = StepWatch(lambda where: None)
    with watch.computing(None):
        pass
    assert watch._thread is None


def _status(thread: int | None, name: str) -> str:
    status = Path(f"/proc/self/task/{thread}/status").read_text(encoding="ascii")
    return next(line for line in status.splitlines() if line.startswith(f"{name}:"))
