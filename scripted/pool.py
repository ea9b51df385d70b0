"""The servers of one test process: shared by equal configuration, replaced when dirty or dead, few at a time.

All are forked from one preloaded parent, so that a fresh server costs a fraction of a second.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import ExitStack
from typing import Any, Final

from engine.config import EngineConfig
from engine.launch.preload import PreloadedParent
from scripted.decorator import ScriptedTest
from scripted.server import ScriptedServer
from scripted.wire import ScriptOptions, ScriptSucceeded

__all__ = ["MAX_SERVERS", "ServerPool"]

# Each server is up to six processes; more than two of them on one worker only take memory from each other.
MAX_SERVERS: Final = 2


class ServerPool:
    """Servers by configuration, least recently used first."""

    def __init__(self, *, mutant: str | None = None) -> None:
        self._mutant = mutant
        self._parent: PreloadedParent | None = None
        self._servers: OrderedDict[EngineConfig, tuple[ScriptedServer, ExitStack]] = OrderedDict()

    def run(self, test: ScriptedTest, options: ScriptOptions, arguments: dict[str, Any]) -> ScriptSucceeded:
        """Run a decorated test on a server of its configuration. Raises its ScriptError."""
        __tracebackhide__ = True
        server = self._server(test.config)
        try:
            return server.run(test.script, options=options, **arguments)
        finally:
            if not server.usable:
                self._drop(test.config)

    def close(self) -> None:
        """End every server, and the parent."""
        for config in list(self._servers):
            self._drop(config)
        if self._parent is not None:
            self._parent.close()
            self._parent = None

    def _server(self, config: EngineConfig) -> ScriptedServer:
        if config not in self._servers:
            while len(self._servers) >= MAX_SERVERS:
                self._drop(next(iter(self._servers)))
            if self._parent is None:
                self._parent = PreloadedParent.start()
            stack = ExitStack()
            server = stack.enter_context(ScriptedServer.start(config, mutant=self._mutant, parent=self._parent))
            self._servers[config] = (server, stack)
        self._servers.move_to_end(config)
        return self._servers[config][0]

    def _drop(self, config: EngineConfig) -> None:
        _, stack = self._servers.pop(config)
        stack.close()
