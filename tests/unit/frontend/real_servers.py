"""Real servers of the embedded model for tests that need the whole way from socket to model and back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess

START_BOUND_S = 60.0
END_BOUND_S = 30.0
CLIENT_TIMEOUT_S = 30.0


class RealServer:
    """A running server: its URL, its process, a plain client."""

    def __init__(self, process: ServerProcess, folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.serving = process.wait_ready(START_BOUND_S)
        self.url = self.serving.base_url
        self.http = httpx.Client(base_url=self.url, timeout=CLIENT_TIMEOUT_S)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()


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
