"""Scripts of the server tier that are interrupted, killed, or kill what they stand on.

The test process is told at once, and nothing is left.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from forked_commands import ForkedCommand, ForkedCommands
from scripted_lockstep.tiers.server.runner import EngineServer

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptOptions, ServerDied

REPOSITORY = Path(__file__).parents[3]
PATIENCE_S = 60.0

ENDLESS = """
import signal
import sys
from pathlib import Path
from engine import EngineConfig
from scripted import ScriptOptions
from scripted_lockstep.tiers.server.runner import EngineServer
from scripted_lockstep.tiers.server import runner

# A server that waits for its frozen scheduler to hear an order waits longer than the test does.
runner.SHUTDOWN_TIMEOUT_S = 600.0


def endless(t, started):
    Path(started).touch()
    while True:
        yield


if __name__ == "__main__":
    # A shell starts what it runs in the background with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with EngineServer.start(EngineConfig()) as server:
        server.run(endless, sys.argv[1], options=ScriptOptions(max_steps=10**9))
"""


@pytest.fixture
def folders() -> Iterator[Path]:
    """Where the processes make their temporary folders: a short path, because sockets lie in them."""
    with tempfile.TemporaryDirectory(prefix="i-") as folder:
        yield Path(folder)


@pytest.fixture
def endless(tmp_path: Path, folders: Path, commands: ForkedCommands) -> Iterator[ForkedCommand]:
    """A process with a server and a script that never ends, from the moment when the script runs."""
    file, started = tmp_path / "endless.py", tmp_path / "started"
    file.write_text(ENDLESS)
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(folders)}
    with Path(os.devnull).open() as nothing, (tmp_path / "said").open("w") as said:
        process = commands.start(file, started, cwd=folders, env=environment, files=(nothing, said, said))
    try:
        wait_until(started.exists)
        yield process
    finally:
        process.kill()
        process.wait(PATIENCE_S)


def wait_until(done: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not done():
        assert time.monotonic() < deadline, f"it did not happen within {patience_s} s"
        time.sleep(0.01)


def folders_in(folder: Path) -> list[Path]:
    """The servers' private folders. What torch keeps beside them is its own."""
    return list(folder.glob("scripted-*"))


def processes_in(folder: Path) -> list[psutil.Process]:
    """The processes of a server, and the one that started it: they work in this folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def test_an_interrupt_ends_the_server_with_its_script(endless: ForkedCommand, folders: Path) -> None:
    assert len(processes_in(folders)) > 3
    os.kill(endless.pid, signal.SIGINT)
    endless.wait(PATIENCE_S)
    wait_until(lambda: not folders_in(folders))
    wait_until(lambda: not processes_in(folders))


class InterruptedSocket:
    """The socket of a gate. Ctrl-C arrives when the first frame is sent, before anybody waits for its reply."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.sent = inner, 0

    def send(self, frame: bytes) -> None:
        self.sent += 1
        self.inner.send(frame)
        if self.sent == 1:
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def test_an_interrupt_right_after_the_order_kills_the_server(parent: PreloadedParent) -> None:
    """Its script runs by then, so it would not read an order to end."""
    with EngineServer.start(EngineConfig(), parent=parent) as server:
        server._socket = interrupted = InterruptedSocket(server._socket)
        with pytest.raises(KeyboardInterrupt):
            server.run(endless_script, options=ScriptOptions(max_steps=10**9))
    assert interrupted.sent == 1


def test_a_killed_test_process_leaves_nothing(endless: ForkedCommand, folders: Path) -> None:
    assert folders_in(folders)
    os.kill(endless.pid, signal.SIGKILL)
    wait_until(lambda: not folders_in(folders))
    wait_until(lambda: not processes_in(folders))


def endless_script(t):
    while True:
        yield


def kills_the_supervisor(t):
    r = t.start_req(prompt_len=5, max_new_tokens=2)
    supervisor = os.getppid()
    os.kill(supervisor, signal.SIGKILL)
    # A busy machine takes its time to end a process.
    wait_until(lambda: os.getppid() != supervisor)
    yield from t.run_until_finished(r)


def test_a_script_that_kills_the_supervisor_is_the_one_that_fails(parent: PreloadedParent) -> None:
    """A dead server is reported with its cause, a hang with every stack (D06)."""
    with EngineServer.start(EngineConfig(), parent=parent) as server, pytest.raises(ServerDied, match="supervisor"):
        server.run(kills_the_supervisor)
