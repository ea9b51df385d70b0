"""Placed stages in a test: their agents on this machine, and the relay through which all their links go.

It owns the ports and the agents, which are the production ones. The scheduler's process orders the state of links, see
``links``.
"""

from __future__ import annotations

import socket
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, Final

import msgspec

from engine.process.links.endpoint import Endpoint
from engine.server.launch.preload import PreloadedParent, ServerProcess
from engine.server.placement.messages import StageOrder
from scripted_lockstep.tiers.server.links import LOOPBACK, Relay, Route
from scripted_lockstep.tiers.server.ray_cluster import LocalCluster

GATHERING_TIMEOUT_S: Final = 120.0
END_TIMEOUT_S: Final = 5.0
# Ray only counts these CPUs: enough for each of several concurrent servers.
RAY_CPUS: Final = 4


class PlacedStages:
    """The stages of one server, joined by our agents or placed on ``cluster``.

    ``settings`` are the server's; the relay takes orders at ``orders_path``. Every connection from or to a stage goes
    through the relay: those to the server, and those between stages.
    """

    def __init__(self, folder: Path, pp_size: int, cluster: LocalCluster | None = None) -> None:
        self.orders_path = folder / "links"
        self._log = folder / "agents.log"
        self._folder = folder
        self._cluster = cluster
        self._agents: list[ServerProcess] = []
        with ExitStack() as stack:
            # Held until the end: a released port might be taken when it is needed.
            ports = [stack.enter_context(closing(_reserved())).getsockname()[1] for _ in range(pp_size + 1)]
            self._server, self._listens = ports[0], ports[1:]
            routes = [Route(self._server, (stage,)) for stage in range(pp_size)]
            routes += [
                Route(port, (stage - 1, stage) if stage else (stage,)) for stage, port in enumerate(self._listens)
            ]
            relay = stack.enter_context(closing(Relay(routes, self.orders_path)))
            self._joins, self._advertised = relay.ports[:pp_size], relay.ports[pp_size:]
            self._stack = stack.pop_all()

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that tell the server where its stages are."""
        placed: dict[str, Any] = {"placement": "join", "stage_listen": f"{LOOPBACK}:{self._server}"}
        if self._cluster is not None:
            placed |= {
                "placement": "ray",
                "ray_address": self._cluster.address,
                "placement_options": msgspec.json.encode(self._orders()).decode(),
            }
        return placed

    def start(self, parent: PreloadedParent, server: ServerProcess) -> None:
        """Start the agents once the server accepts them, unless Ray starts them."""
        if self._cluster is not None:
            return
        gathering = server.wait_gathering(GATHERING_TIMEOUT_S)
        for order in self._orders():
            self._agents.append(parent.join(order, gathering.secret_file, self._log, temp_dir=str(self._folder)))

    def close(self) -> None:
        """End the remaining agents and the relay; idempotent."""
        for agent in self._agents:
            _reap(agent)
        self._agents = []
        self._stack.close()

    def _orders(self) -> list[StageOrder]:
        """Return the routes through the relay: to the server, and from the stage before."""
        ways = zip(self._joins, self._listens, self._advertised, strict=True)
        return [
            StageOrder(
                join=Endpoint(LOOPBACK, join),
                stage=stage,
                listen=Endpoint(LOOPBACK, listen),
                advertise=Endpoint(LOOPBACK, advertised),
                node=f"machine-{stage}",
            )
            for stage, (join, listen, advertised) in enumerate(ways)
        ]


def _reap(agent: ServerProcess) -> None:
    """Wait for an agent to end with its server; kill it if it does not."""
    try:
        agent.wait(END_TIMEOUT_S)
    except TimeoutError:
        agent.kill()
        agent.wait(END_TIMEOUT_S)
    agent.close()


def _reserved() -> socket.socket:
    """Reserve a port: no other process gets it while this socket is open, but an explicit listener still can."""
    holder = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    holder.bind((LOOPBACK, 0))
    return holder
