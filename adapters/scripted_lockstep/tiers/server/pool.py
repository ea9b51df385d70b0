"""The servers of one test process: at most a few, shared by equal configurations, replaced when dirty or dead.

All are forked from one preloaded parent, so that a fresh server costs a fraction of a second.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from engine.core.config import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted_lockstep.tiers.server.parent import start_parent
from scripted_lockstep.tiers.server.placed_stages import RAY_CPUS
from scripted_lockstep.tiers.server.ray_cluster import LocalCluster
from scripted_lockstep.tiers.server.role_runner import EngineRole
from scripted_lockstep.tiers.server.runner import EngineServer

# A server has up to six processes; more than two servers on one worker only compete for memory.
MAX_SERVERS: Final = 2
# Enough for each stage of most tests.
CLUSTER_NODES: Final = 4

_Key = tuple[EngineConfig, str | None, str]
_Server = EngineServer | EngineRole


def start_server(
    config: EngineConfig,
    *,
    mutant: str | None,
    parent: PreloadedParent | None = None,
    placement: str = "local",
    cluster: LocalCluster | None = None,
) -> _Server:
    """Start the server that scripts of this configuration run on. Raises StartupError with the cause of a failure."""
    if config.role != "both":
        return EngineRole(config, mutant=mutant, parent=parent)
    return EngineServer.start(config, mutant=mutant, parent=parent, placement=placement, cluster=cluster)


class EngineServers:
    """Servers by configuration, mutant and placement, least recently used first.

    They are forked from ``parent``, or from one of the pool's own.
    """

    def __init__(self, parent: PreloadedParent | None = None) -> None:
        self._parent = parent
        self._owns_parent = parent is None
        self._servers: OrderedDict[_Key, _Server] = OrderedDict()
        # Shared by all servers whose stages Ray places: a cluster takes seconds to start.
        self._cluster: LocalCluster | None = None

    @contextlib.contextmanager
    def lend(
        self, config: EngineConfig, *, mutant: str | None = None, placement: str = "local", device: str | None = None
    ) -> Iterator[_Server]:
        """Lend a server for one or more scripts; it returns to the pool unless they made it unusable.

        ``device`` is used in place of the configuration's.
        """
        if device is not None:
            config = config.model_copy(update={"device": device})
        if config.pp_size == 1:
            placement = "local"  # A single stage has no process that could be placed.
        key = (config, mutant, placement)
        server = self._take(key)
        try:
            yield server
        finally:
            if not server.usable:
                self._drop(key)

    def close(self) -> None:
        """End every server, and the pool's own parent."""
        for key in list(self._servers):
            self._drop(key)
        if self._parent is not None and self._owns_parent:
            self._parent.close()
            self._parent = None
        if self._cluster is not None:
            self._cluster.close()
            self._cluster = None

    def _take(self, key: _Key) -> _Server:
        if key in self._servers and not self._servers[key].is_alive:
            self._drop(key)  # It died after its last script, so a later test is not to blame.
        if key not in self._servers:
            while len(self._servers) >= MAX_SERVERS:
                self._drop(next(iter(self._servers)))
            if self._parent is None:
                self._parent = start_parent()
            config, mutant, placement = key
            if placement == "ray" and self._cluster is None:
                self._cluster = LocalCluster(CLUSTER_NODES, cpus=RAY_CPUS)
            self._servers[key] = start_server(
                config, mutant=mutant, parent=self._parent, placement=placement, cluster=self._cluster
            )
        self._servers.move_to_end(key)
        return self._servers[key]

    def _drop(self, key: _Key) -> None:
        self._servers.pop(key).shutdown()
