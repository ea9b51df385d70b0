"""The stacks of a late process are told whole, also if it writes them late or slowly."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from scripted_lockstep.tiers.server.stacks import dump_stacks

from scripted.script.child import ChildLate, run_in_child

THREADS, DEPTH = 90, 95
# It takes the signal half a second after it was sent.
TAKES_ITS_TIME = """
import faulthandler, signal, time
faulthandler.register(signal.SIGUSR1, all_threads=True)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("ready", flush=True)
while signal.SIGUSR1 not in signal.sigpending():
    time.sleep(0.01)
time.sleep(0.7)
def goes_on():
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])
    time.sleep(60)
goes_on()
"""


def waits_below(depth: int, event: threading.Event) -> None:
    if depth:
        waits_below(depth - 1, event)
    else:
        event.wait()


def has_many_stacks() -> bytes:
    event = threading.Event()
    for _ in range(THREADS):
        threading.Thread(target=waits_below, args=(DEPTH, event), daemon=True).start()
    while True:
        time.sleep(1)


def test_a_child_with_many_stacks_tells_its_last() -> None:
    """They are written thread by thread, the first thread last."""
    with pytest.raises(ChildLate) as caught:
        run_in_child(has_many_stacks, 2)
    assert caught.value.stacks.count("in waits_below") > THREADS
    assert "in has_many_stacks" in caught.value.stacks


def test_a_process_that_takes_the_signal_late_tells_its_stacks(tmp_path: Path) -> None:
    log = tmp_path / "log"
    with (
        log.open("wb") as errors,
        subprocess.Popen([sys.executable, "-c", TAKES_ITS_TIME], stdout=subprocess.PIPE, stderr=errors) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            (stack,) = dump_stacks({"one": process.pid}, log)
        finally:
            process.kill()
    assert "in goes_on" in stack.text
