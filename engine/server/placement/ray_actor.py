"""The Ray actor of one stage: runs the stage's agent as a child process, which ends with it.

No request passes through the actor: the agent joins the server by itself. Ray's workers import this module, so it
imports neither Ray nor torch before an actor needs them.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import deque
from typing import Any, Final

import msgspec

from engine import __version__
from engine.server.placement.messages import StageOrder

# A name instead of an import: the agent is a layer above this one, and runs in its own process.
CHILD_MODULE: Final = "engine.server.launch.agent"
KEPT_LINES: Final = 12


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """An actor's node: Ray's id, address, host name, the installed version of the engine, and the niceness that the
    stage inherits.
    """

    node_id: str
    address: str
    host: str
    version: str
    nice: int = 0

    def __str__(self) -> str:
        return f"{self.name} at {self.address}"

    @property
    def name(self) -> str:
        return f"node {self.node_id[:12]}"


class AgentEnd(msgspec.Struct, frozen=True, kw_only=True):
    """An agent's exit status, negative for a signal as in subprocess, and the last lines of its stderr."""

    status: int
    said: tuple[str, ...]


class StageHost:
    """The actor class. A call of ``run`` lasts as long as the agent."""

    def place(self) -> Place:
        import ray

        nodes: Any = ray.nodes  # Ray has no type for it

        node_id = ray.get_runtime_context().get_node_id()
        # The cluster's own address: a node may have been given another one than the machine's first.
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes()}
        return Place(
            node_id=node_id, address=addresses[node_id], host=socket.gethostname(), version=__version__, nice=os.nice(0)
        )

    def run(self, order: StageOrder, secret: str) -> AgentEnd:
        """Run an agent until it ends. Passes its order and the secret by a pipe."""
        said: deque[str] = deque(maxlen=KEPT_LINES)
        agent = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", CHILD_MODULE, str(os.getpid())],
            # The agent needs the driver's folders, which Ray has added to this worker's import path.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            stdin=subprocess.PIPE,
            # Its stdout is only for a person who starts it by hand.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert agent.stdin is not None
        assert agent.stderr is not None
        with agent.stdin:
            agent.stdin.write(msgspec.json.encode((order, secret)))
        with agent.stderr:
            for line in map(_text, agent.stderr):
                # Ray keeps a worker's stderr, and shows it to the driver.
                sys.stderr.write(line)
                said.append(line.rstrip())
        return AgentEnd(status=agent.wait(), said=tuple(said))


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
