"""Real servers of the embedded model for tests that need the whole way from socket to model and back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess

START_BOUND_S = 60.0
END_BOUND_S = 30.0
CLIENT_TIMEOUT_S = 60.0
# By default a route waits a second for the scheduler's counters, which on a busy machine may not run for so long.
STATS_BOUND_S = 30.0


class RealServer:
    """A running server: its URL, its process, a plain client."""

    def __init__(self, process: ServerProcess, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.serving = process.wait_ready(START_BOUND_S)
        self.url = self.serving.base_url
        self.http = httpx.Client(base_url=self.url, timeout=CLIENT_TIMEOUT_S)

    def info(self) -> dict[str, Any]:
        return info_of(self.http)

    def stats(self) -> dict[str, Any]:
        return self.info()["stats"]

    def load(self) -> dict[str, Any]:
        answer = _complete(lambda: self.http.get("/get_load"), lambda answer: answer.status_code != 503)
        (load,) = answer.raise_for_status().json()
        return load

    def metrics(self) -> httpx.Response:
        return _complete(lambda: self.http.get("/metrics"), lambda answer: "engine_kv_cache_usage_perc{" in answer.text)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


def info_of(http: httpx.Client) -> dict[str, Any]:
    """Return ``/server_info`` with the scheduler's counters."""
    return http.get("/server_info", params={"timeout": STATS_BOUND_S}).raise_for_status().json()


def _complete(ask: Callable[[], httpx.Response], has_counters: Callable[[httpx.Response], bool]) -> httpx.Response:
    deadline = time.monotonic() + STATS_BOUND_S
    while not has_counters(answer := ask()):
        assert time.monotonic() < deadline, f"the scheduler did not answer within {STATS_BOUND_S:g} s: {answer.text}"
    return answer


@contextmanager
def running(parent: PreloadedParent, folder: Path, **settings: object) -> Iterator[RealServer]:
    """A server for the length of a block; nothing of it is left."""
    process = parent.serve(ServerSettings(**{"port": 0, **settings}), folder, folder / "log")
    try:
        server = RealServer(process, folder)
        yield server
        server.http.close()
    finally:
        process.kill()
        process.wait(END_BOUND_S)
        process.close()
