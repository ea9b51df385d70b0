"""A server whose stages have joined by TCP on loopback, for tests: agents forked from one preloaded parent."""

from __future__ import annotations

import shutil
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from engine.process.control import Gathering
from engine.process.settings import ServerSettings
from engine.server.launch.preload import PreloadedParent, ServerProcess
from engine.server.placement.messages import StageOrder

__all__ = ["END_BOUND_S", "STAGES", "JoinedServer"]

STAGES = 4
START_BOUND_S = 60.0
END_BOUND_S = 30.0
LOOK_S = 0.02
CLIENT_TIMEOUT_S = 60.0


class JoinedServer:
    """A server and the agents of its stages. A context manager, which leaves nothing."""

    def __init__(self, parent: PreloadedParent, **settings: Any) -> None:
        self._stack = ExitStack()
        self._parent = parent
        self.folder = Path(tempfile.mkdtemp(prefix="joined-"))
        self._stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        wanted = {"port": 0, "pp_size": STAGES, "placement": "join", "stage_listen": "127.0.0.1:0"} | settings
        self.server = parent.serve(ServerSettings(**wanted), self.folder, self.folder / "server.log")
        self._stack.callback(_end, self.server)
        self.agents: list[ServerProcess] = []
        self.gathering: Gathering = self.server.wait_gathering(START_BOUND_S)

    def join(self, **options: Any) -> ServerProcess:
        order = StageOrder(join=self.gathering.join, **options)
        agent = self._parent.join(order, self.gathering.secret_file, self.log(len(self.agents)))
        self.agents.append(agent)
        self._stack.callback(_end, agent)
        return agent

    def wait_ready(self) -> None:
        serving = self.server.wait_ready(START_BOUND_S)
        self.pids = serving.pids
        self.url = serving.base_url
        self.http = self._stack.enter_context(httpx.Client(base_url=self.url, timeout=CLIENT_TIMEOUT_S))

    def agent_of(self, stage: int) -> ServerProcess:
        """The agent whose stage has this number."""
        parent = psutil.Process(self.pids[f"stage-{stage}"]).ppid()
        return next(agent for agent in self.agents if agent.pid == parent)

    def log(self, agent: int) -> Path:
        return self.folder / f"agent-{agent}.log"

    def server_log(self) -> str:
        return (self.folder / "server.log").read_text()

    def await_log(self, text: str) -> None:
        """Wait until the server has said this."""
        deadline = time.monotonic() + END_BOUND_S
        while text not in self.server_log():
            assert time.monotonic() < deadline, self.server_log()
            time.sleep(LOOK_S)

    def output_ids(self, text: str, tokens: int) -> list[int]:
        body = {"text": text, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
        return list(self.http.post("/generate", json=body).json()["output_ids"])

    def processes(self) -> list[psutil.Process]:
        """Return all processes, on both sides."""
        return [psutil.Process(pid) for pid in {*self.pids.values(), *(one.pid for one in (self.server, *self.agents))}]

    def __enter__(self) -> JoinedServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _end(process: ServerProcess) -> None:
    process.kill()
    process.wait(END_BOUND_S)
    process.close()
