"""Processes of this engine, as users start them, for the length of a block."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from typing import Final

import httpx

START_S: Final = 180.0


@contextlib.contextmanager
def engine_process(*words: str, cores: Collection[int] = (), threads: int = 1) -> Iterator[subprocess.Popen[bytes]]:
    """A command of the engine, on these cores alone if any are given, ended in order."""
    variables = os.environ | {"ENGINE_LOG_REQUESTS": "0", "OMP_NUM_THREADS": str(threads)}
    command = [sys.executable, "-m", "engine", *words]
    ours = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores or ours)
    try:
        process = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL)  # noqa: S603 - our own interpreter
    finally:
        os.sched_setaffinity(0, ours)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def wait_for(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == httpx.codes.OK:
                return
        time.sleep(0.2)
    raise SystemExit(f"error: {url} must serve within {START_S:g} s, but does not; its log above says why")
