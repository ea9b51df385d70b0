"""The router's process: the front on its socket and a watch over each engine, until a signal ends it.

Computes nothing and keeps nothing on disk. It has no child process, so it needs no supervisor.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Final

import httpx
from starlette.routing import Route
from starlette.types import ASGIApp

from engine.cluster.router.engines import RoutedEngine, RoutedEngines, RouterPages, RouterPlan
from engine.cluster.router.front import front_app
from engine.cluster.router.operators import VERBS, FleetOperators
from engine.cluster.router.prompt_reader import PromptReader, ReadsPrompts
from engine.cluster.router.proxy import EngineProxy
from engine.cluster.router.watch import EngineWatch
from engine.core.errors import EngineError
from engine.core.routing.placement import Placement
from engine.frontend.http.auth import Access
from engine.frontend.http.connection import quiet_resource_errors
from engine.frontend.http.process import EventServer, uvicorn_config
from engine.frontend.http.request_log import RequestLog
from engine.process.clock import MonotonicClock
from engine.process.links.listener import base_url, bind_server
from engine.process.logs import configure_logging
from engine.process.settings import ServerSettings

# The most pages to remember for an engine that publishes no KV events.
INDEX_PAGES: Final = 32_768
EXIT_FAILED: Final = 1


class Router:
    """The parts of a router: ``app`` serves clients while ``watches`` run beside it."""

    def __init__(
        self,
        settings: ServerSettings,
        plan: RouterPlan,
        access: Access,
        *,
        reader: ReadsPrompts | None = None,
        transport_of: Callable[[str], httpx.AsyncBaseTransport | None] = lambda _: None,
    ) -> None:
        """Tests pass a ``reader`` and transports of their own."""
        placement = Placement(plan.rules, index_chunks=INDEX_PAGES)
        self._proxies = {url: EngineProxy(url, url, settings, transport_of(url)) for url in plan.urls}
        self.engines = RoutedEngines(placement, {url: RoutedEngine(proxy) for url, proxy in self._proxies.items()})
        reader = reader or PromptReader()
        self.watches = [EngineWatch(url, self.engines, reader, plan.period_s) for url in plan.urls]
        pages = RouterPages(self.engines, access)
        own = (Route("/health", pages.health), Route("/metrics", pages.metrics))
        self.operators = FleetOperators(self.engines, settings, access, plan)
        of_all = dict.fromkeys(VERBS, self.operators.answer)
        front = front_app(self.engines, settings, reader.prompt_of, own=own, access=access, of_all=of_all)
        self.app: ASGIApp = RequestLog(front, MonotonicClock())

    async def close(self) -> None:
        await self.operators.close()
        for proxy in self._proxies.values():
            await proxy.close()


def run_router(settings: ServerSettings, plan: RouterPlan) -> int:
    """Route until SIGTERM or SIGINT, then let live requests finish. Returns the exit status."""
    configure_logging(settings)
    try:
        listener = bind_server(settings.host, settings.port)
        asyncio.run(_route(settings, plan, listener))
    except EngineError as exc:
        sys.stderr.write(f"error: {exc}\n")
        return EXIT_FAILED
    return 0


async def _route(settings: ServerSettings, plan: RouterPlan, listener: socket.socket) -> None:
    router = Router(settings, plan, Access(settings, listener.getsockname()[0]))
    config = uvicorn_config(router.app, settings)
    config.timeout_graceful_shutdown = int(settings.drain_timeout_s)
    server = EventServer(config, lambda: _announce(plan.urls, base_url(listener)))
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(quiet_resource_errors())
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    async with asyncio.TaskGroup() as tasks:
        watching = [tasks.create_task(watch.run()) for watch in router.watches]
        await server.serve(sockets=[listener])
        for watch in watching:
            watch.cancel()
    await router.close()


def _announce(urls: Sequence[str], at: str) -> None:
    sys.stdout.write(f"routing to {', '.join(urls)} at {at}\n")
    sys.stdout.flush()
