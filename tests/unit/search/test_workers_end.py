"""A search that is killed leaves no workers, which would wait for units forever: each has both ends of its queues."""

import signal
import subprocess
import sys
import time

import psutil
import pytest

SEARCH = (sys.executable, "-m", "scripted", "explore", "--jobs", "2", "--minutes", "5", "--no-keep")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_workers_of_a_killed_search_end(number, tmp_path):
    search = subprocess.Popen(SEARCH, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        parent = psutil.Process(search.pid)
        while len(workers := _workers(parent)) < 2:
            time.sleep(0.05)
        search.send_signal(number)
        search.wait(30)
        _, left = psutil.wait_procs(workers, timeout=30)
        assert not left, f"workers outlive a search that was ended by {number.name}"
    finally:
        search.kill()
        search.wait()


def _workers(parent):
    return [one for one in parent.children() if any("spawn_main" in word for word in one.cmdline())]
