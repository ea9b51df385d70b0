"""A Ray cluster of one node on loopback, and ``serve run`` of the application on it, for the length of a block.

Owns its processes, its folder and the proof that nothing of either is left.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import httpx
import psutil

# Not 127.0.0.1, which `ray start` replaces by an address that others reach.
NODE: Final = "127.0.9.1"
BIN: Final = Path(sys.executable).parent
REPOSITORY: Final = Path(__file__).parents[2]
# Two engines import their libraries at once, on machines that may be small and busy.
BOUND_S: Final = 300.0
END_S: Final = 60.0
ENGINE_ACTOR: Final = "ServeReplica:default:engine"


class ServedApp:
    """The application. ``url`` is where its proxy listens."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[psutil.Process] = set()
        self._started: list[subprocess.Popen[bytes]] = []
        gcs, http = _free_port(NODE), _free_port("127.0.0.1")
        self._ports = gcs, http
        self.url = f"http://127.0.0.1:{http}"
        self._address = f"{NODE}:{gcs}"
        (folder / "files").mkdir()
        self._environment = os.environ | {
            "RAY_ADDRESS": self._address,
            # A token of this cluster's own: other clusters of this machine are other people's.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_enable_metrics_collection": "0",
            # Ray kills workers when the machine's memory is nearly full, whoever uses it.
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_BACKEND_LOG_LEVEL": "warning",
            "RAY_worker_niceness": "0",
            "PYTHONPATH": str(REPOSITORY),
            "TMPDIR": str(folder / "files"),
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }

    def start(self, arguments: tuple[str, ...]) -> None:
        """Start the node and the application; returns before there is an engine."""
        gcs, http = self._ports
        self._start(
            *("ray", "start", "--head", "--block", "--include-dashboard=false", "--disable-usage-stats"),
            *(f"--node-ip-address={NODE}", f"--port={gcs}", f"--temp-dir={self._folder / 'ray'}", "--num-cpus=4"),
        )
        self.wait(lambda: _answers(NODE, gcs), "the node")
        self._call("serve", "start", f"--address={self._address}", "--http-host=127.0.0.1", f"--http-port={http}")
        self._start("serve", "run", "engine.cluster.serve_app:build", *arguments)

    @property
    def log(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted(self._folder.glob("*.log")))

    def wait_ready(self, engines: int) -> None:
        """Wait until this many engines report their load."""
        self.wait(lambda: len(self.loads()) == engines, f"{engines} engines")

    def loads(self) -> list[dict[str, int]]:
        """The loads that the engines report; nothing while none does."""
        try:
            answer = httpx.get(f"{self.url}/get_load", timeout=30)
        except httpx.HTTPError:
            return []
        return list(answer.json()) if answer.status_code == 200 else []

    def actors(self) -> list[psutil.Process]:
        """The processes of the engines' replicas."""
        return [process for process in self._processes() if _is(process, ENGINE_ACTOR)]

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until it holds, or a process of the application has failed. The bound is for what hangs alone."""
        deadline = time.monotonic() + BOUND_S
        while not condition():
            ended = [command.args for command in self._started if command.poll() not in (None, 0)]
            if ended or time.monotonic() > deadline:
                why = f"{ended} ended" if ended else f"{BOUND_S:g} s passed"
                raise TimeoutError(f"{what} did not come, but {why}\n{self.log[-4000:]}")
            time.sleep(0.1)

    def close(self) -> None:
        """End the application as Ctrl-C does, then the node; kill what is left."""
        self._processes()
        # The node was the first.
        for command in reversed(self._started):
            command.send_signal(signal.SIGTERM if command is self._started[0] else signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                command.wait(END_S)
            # What an engine was just starting removes its folder when it sees that it is not wanted.
            self._processes()
        _, left = psutil.wait_procs(self._seen, timeout=END_S)
        for process in left:
            process.kill()
        psutil.wait_procs(left, timeout=30)
        # One that was killed is waited for too, or a later test is told that it still runs.
        for command in self._started:
            command.wait(END_S)

    def remains(self) -> list[str]:
        """List the processes and engines' files that are left of it."""
        alive = [str(process) for process in self._seen if process.is_running()]
        return [*alive, *map(str, (self._folder / "files").glob("engine-*"))]

    def _processes(self) -> set[psutil.Process]:
        for command in self._started:
            with contextlib.suppress(psutil.Error):
                self._seen |= set(psutil.Process(command.pid).children(recursive=True))
        return {process for process in self._seen if process.is_running()}

    def _start(self, command: str, *arguments: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{command}.log").open("ab") as log:
            started = subprocess.Popen(
                [BIN / command, *arguments], env=self._environment, cwd=self._folder, stdout=log, stderr=log
            )
        self._started.append(started)
        with contextlib.suppress(psutil.Error):
            self._seen.add(psutil.Process(started.pid))
        return started

    def _call(self, command: str, *arguments: str) -> None:
        called = self._start(command, *arguments)
        self.wait(lambda: called.poll() == 0, f"the end of {command}")


@contextlib.contextmanager
def served(*arguments: str) -> Iterator[ServedApp]:
    """The application with these arguments of its builder."""
    # Short: the node and the engines have Unix sockets in it.
    folder = Path(tempfile.mkdtemp(prefix="served-", dir="/tmp"))
    app = ServedApp(folder)
    try:
        app.start(arguments)
        yield app
    finally:
        try:
            app.close()
            remains = app.remains()
            assert not remains, f"these remain of the application: {remains}"
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as listener:
        return int(listener.getsockname()[1])


def _answers(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True


def _is(process: psutil.Process, name: str) -> bool:
    try:
        return any(name in word for word in process.cmdline())
    except psutil.Error:
        return False
