"""The deployment of engines: each replica is an actor that owns a server and passes requests to it over loopback.

The server does not run in the actor's process: an engine forks before any thread exists, and dies or drains by its
supervisor's rules, which an application inside the actor would lack.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import ray
from ray import serve

from engine.errors import ProcessDiedError, StartupError
from engine.frontend.errors import ApiError
from engine.launch.preload import PreloadedParent
from engine.router.proxy import EngineProxy, Head, Headers, PassedRequest
from engine.settings import ServerSettings

# Where this process's stderr goes, as a path: Ray keeps it in a log file of the replica, and the server's with it.
_LOG: Final = Path("/proc/self/fd/2")
# What processes need to end after the live requests have.
_GRACE_S: Final = 5.0


class OwnServer:
    """A running server. ``close()`` ends it and removes its folder."""

    def __init__(self, settings: ServerSettings) -> None:
        """Start it and wait until it is ready. Raises StartupError, with the cause."""
        self._parent = PreloadedParent.start()
        # From the order on the parent removes it, should this process be killed.
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))
        if settings.radix_cache:
            ends = {f"kv_events{end}": f"ipc://{self._folder}/kv{end}" for end in ("_endpoint", "_replay_endpoint")}
            settings = settings.model_copy(update={"kv_events": True, **ends})
        self._drain_s = settings.drain_timeout_s + _GRACE_S
        # Where its KV events are published and asked for again, on this node; empty where there are none.
        self.kv_endpoints = settings.kv_events_endpoint, settings.kv_events_replay_endpoint
        try:
            self._server = self._parent.serve(settings, self._folder, _LOG, remove_private_dir=True)
            serving = self._server.wait_ready(settings.start_timeout_s)
        except TimeoutError as exc:
            self._end()
            raise StartupError(
                f"an engine must be ready within start_timeout_s={settings.start_timeout_s}, but was not; raise it"
            ) from exc
        except BaseException:
            self._end()
            raise
        self.base_url = serving.base_url

    def drain(self) -> None:
        """Let live requests end, within the server's own bound; take no more. Returns when it has ended."""
        self._server.drain()
        try:
            self._server.wait(self._drain_s)
        except TimeoutError:
            self._server.kill()

    def close(self) -> None:
        """End the server, at once if it was not drained. Idempotent."""
        self._server.close()
        self._end()

    def _end(self) -> None:
        self._parent.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineReplica:
    """One engine. Serve calls what has no caller here."""

    def __init__(self, settings_json: str) -> None:
        settings = ServerSettings.model_validate_json(settings_json)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._server = OwnServer(settings)
        self._proxy = EngineProxy(self._server.base_url, self._name, settings)
        self._node = ray.get_runtime_context().get_node_id()
        self._about: dict[str, Any] = {}

    async def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        """Pass a request to the engine. Cancelled when the client leaves, which ends it in the engine."""
        answer = self._proxy.answer(request)
        async with contextlib.aclosing(answer):  # type: ignore[type-var] # a generator, typed as what it is used for
            async for part in answer:
                yield part

    async def load(self, headers: Headers) -> dict[str, Any] | ApiError:
        """The engine's load for a client; a refusal is returned, so that it arrives as what it is."""
        try:
            return await self._proxy.load_for(headers)
        except ApiError as exc:
            return exc

    async def record_routing_stats(self) -> dict[str, Any]:
        """Tell the routers the load, and whether the engine takes requests."""
        if await self._proxy.why_not_serving() is not None:
            return {"accepting": False}
        if not self._about:
            with contextlib.suppress(ApiError):
                self._about = await self._proxy.about()
        live, replay = self._server.kv_endpoints
        told = {"node": self._node, "live": live, "replay": replay}
        if live and self._about:
            told["page_size"] = self._about["limits"]["page_size"]
        return {"accepting": True, "load": await self._proxy.load(), "told": told}

    async def about(self) -> dict[str, Any] | ApiError:
        """The engine's settings and limits, by which a front reads prompts; a refusal is returned."""
        try:
            return await self._proxy.about()
        except ApiError as exc:
            return exc

    async def check_health(self) -> None:
        """Raise when the engine does not serve: Serve then starts another replica."""
        if await self._proxy.why_not_serving() is not None:
            raise ProcessDiedError("engine", "its /health does not answer 200; the replica's log says why")

    async def __del__(self) -> None:
        """End the engine. Serve has let the live requests end."""
        await self._proxy.close()
        await asyncio.to_thread(self._server.drain)
        self._server.close()
