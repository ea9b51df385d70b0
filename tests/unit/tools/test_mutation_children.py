"""Children of a campaign: what they say arrives, and whatever ends one of them ends nothing else."""

import os
import signal
from pathlib import Path

from tools.mutation.children import run_children


def speak(say):
    say(b"x" * 200_000)


def fail(say):
    say(b"before")
    raise RuntimeError("a child's error stays in the child")


def hang(say):
    say(b"busy")
    signal.setitimer(signal.ITIMER_PROF, 0.01)
    while True:
        pass


def die(say):
    os.kill(os.getpid(), signal.SIGKILL)


def test_each_child_ends_in_its_own_way():
    ends = dict(run_children(iter([speak, fail, hang, die]), 2))
    assert {number: (len(end.said), end.signal) for number, end in ends.items()} == {
        0: (200_000, 0),
        1: (6, 0),
        2: (4, signal.SIGPROF),
        3: (0, signal.SIGKILL),
    }


def test_no_child_is_left_and_no_pipe():
    before = len(list(Path("/proc/self/fd").iterdir()))
    assert len(list(run_children(iter([speak] * 5), 3))) == 5
    assert len(list(Path("/proc/self/fd").iterdir())) == before
