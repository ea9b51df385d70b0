"""What computes is judged by the time in which it could: on a busy machine a run takes many times its work."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripted.core.adapters import adapter_named
from scripted.core.schedule import Schedule
from scripted.script import bounded_command
from scripted.script.bounded_command import run_bounded
from scripted.script.child import ChildLate, run_in_child
from scripted.search import written_test
from scripted.search.written_test import write_test

ROOT = Path(__file__).resolve().parents[3]
FIXED = "examples/your_scheduler/fixed.py"


def slowly(own: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    """The call after a time in which its process gets no CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return own(*args, **kwargs)

    return call


def test_a_written_test_is_not_judged_by_the_wall(monkeypatch: pytest.MonkeyPatch) -> None:
    """`--to-script` dropped a test of some milliseconds as one that hangs, after 20 seconds of a busy machine."""
    monkeypatch.chdir(ROOT)
    known: Any = adapter_named(FIXED)
    own = type(known).drive

    def drive(self: Any, run: Any) -> None:
        time.sleep(0.3)
        own(self, run)

    monkeypatch.setattr(type(known), "drive", drive)
    monkeypatch.setattr(written_test, "_LIMIT_S", 0.2)
    written = write_test([Schedule.parse(f"adapter={FIXED}; 1 start a prompt=4 new=1")], name="slow")
    assert written.text is not None, written.said


def test_a_busy_child_gets_the_time_that_others_took() -> None:
    """The replay of a failed test was said to hang, because the machine was busy for two minutes."""
    assert run_in_child(slowly(lambda: b"done", 0.3), 0.2, is_busy=True) == b"done"


def test_a_command_is_bounded_by_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of a standalone test raised an error after 300 seconds of a busy machine."""
    monkeypatch.setattr(bounded_command, "_WALL_TIMES", 30)
    slow = run_bounded([sys.executable, "-c", "import time; time.sleep(1.5); print('done')"], 1, environment={})
    assert (slow.returncode, slow.stdout) == (0, b"done\n")
    assert run_bounded([sys.executable, "-c", "while True: pass"], 1, environment={}).returncode == -signal.SIGXCPU
    monkeypatch.setattr(bounded_command, "_WALL_TIMES", 0.5)
    waiting = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert run_bounded(waiting, 1, environment={}).returncode == -signal.SIGKILL


@pytest.mark.parametrize("waits", [False, True], ids=["computes", "waits"])
def test_a_child_that_never_ends_is_late(waits: bool) -> None:
    def forever() -> bytes:
        while True:
            if waits:
                time.sleep(60)

    with pytest.raises(ChildLate):
        run_in_child(forever, 0.2, is_busy=True)
