"""The Ray actor of one stage: it runs the stage's agent as a child process, which ends with it.

Nothing of a request goes through the actor: the agent joins the engine by itself. Imported by Ray's workers, so it
imports neither Ray nor torch before an actor needs it.
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

# A layer above this one, in a process of its own.
CHILD_MODULE: Final = "engine.server.launch.agent"
KEPT_LINES: Final = 12


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an actor is: Ray's id of the node, its address, its host name, and the engine that is installed there.

    ``nice`` is the niceness that the stage inherits.
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
    """How an agent ended: its exit status, as subprocess counts it, and the last lines of its stderr."""

    status: int
    said: tuple[str, ...]


class StageHost:
    """The actor. ``run`` lasts as long as the agent."""

    def place(self) -> Place:
        import ray

        nodes: Any = ray.nodes  # which has no types

        node_id = ray.get_runtime_context().get_node_id()
        # As the cluster knows it: a node may have been given another address than the machine's first one.
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in nodes()}
        return Place(
            node_id=node_id,
            address=addresses[node_id],
            host=socket.gethostname(),
            version=__version__,
            nice=os.nice(0),
        )

    def run(self, order: StageOrder, secret: str) -> AgentEnd:
        """Run an agent until it ends. What it needs, the secret too, goes to it by a pipe."""
        said: deque[str] = deque(maxlen=KEPT_LINES)
        agent = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            [sys.executable, "-m", CHILD_MODULE, str(os.getpid())],
            # The agent imports what this worker imports: Ray has added the driver's folders to it.
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)},
            stdin=subprocess.PIPE,
            # What it says there is for a person who has started it.
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        assert agent.stdin is not None
        assert agent.stderr is not None
        with agent.stdin:
            agent.stdin.write(msgspec.json.encode((order, secret)))
        with agent.stderr:
            for line in map(_text, agent.stderr):
                # Ray keeps what a worker says, and shows it to the driver.
                sys.stderr.write(line)
                said.append(line.rstrip())
        return AgentEnd(status=agent.wait(), said=tuple(said))


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
