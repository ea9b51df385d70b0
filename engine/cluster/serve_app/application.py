"""The Serve application: a deployment of fronts, which take requests and choose an engine by prefix, over a deployment
of engines.

Each engine replica is an actor that owns a server and passes requests to it over loopback. The server runs in its own
processes, because an engine must fork before any thread exists, and because its supervisor drains and ends it. Tells
Serve the number, health and load of both deployments.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import logging
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec
import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from engine.cluster.router.front import front_app
from engine.cluster.router.prompt_reader import PromptReader, prompt_in
from engine.cluster.router.proxy import EngineProxy, Head, Headers, PassedRequest, ReplicaLostError
from engine.cluster.serve_app.options import AppOptions, read_options
from engine.cluster.serve_app.request_router import PrefixRequestRouter
from engine.core.errors import EngineError, ProcessDiedError, StartupError
from engine.core.routing.load import Load
from engine.core.routing.placement import Prompt
from engine.frontend.http.peers import About, PartnerError
from engine.frontend.schema.errors import ApiError
from engine.process.settings import REVEAL_KEYS, ServerSettings
from engine.server.launch.preload import PreloadedParent

# This process's stderr as a path: Ray keeps it in the replica's log file, so the server's output goes there too.
_LOG: Final = Path("/proc/self/fd/2")
# Time for the processes to end after the live requests.
_GRACE_S: Final = 5.0


class OwnServer:
    """A running server. ``close()`` ends it and removes its folder."""

    def __init__(self, settings: ServerSettings) -> None:
        """Start the server and wait until it is ready. Raises StartupError with the cause."""
        self._parent = PreloadedParent.start()
        # Once the parent has the command, it removes the folder even if this process is killed.
        self._folder = Path(tempfile.mkdtemp(prefix="engine-"))
        if settings.radix_cache:
            ends = {f"kv_events{end}": f"ipc://{self._folder}/kv{end}" for end in ("_endpoint", "_replay_endpoint")}
            settings = settings.model_copy(update={"kv_events": True, **ends})
        self._drain_s = settings.drain_timeout_s + _GRACE_S
        # The live and the replay endpoint of its KV events, on this node; empty without a prefix cache.
        self.kv_endpoints = settings.kv_events_endpoint, settings.kv_events_replay_endpoint
        try:
            self._server = self._parent.serve(settings, self._folder, _LOG, remove_private_dir=True)
            serving = self._server.wait_ready(settings.start_timeout_s)
        except TimeoutError as exc:
            self._end()
            raise StartupError(
                f"an engine must be ready within start_timeout_s={settings.start_timeout_s} seconds, but was not; "
                "raise it"
            ) from exc
        except BaseException:
            self._end()
            raise
        self.base_url = serving.base_url

    def drain(self) -> None:
        """Refuse new requests and wait, within the server's bound, until the live ones and the server have ended."""
        self._server.drain()
        try:
            self._server.wait(self._drain_s)
        except TimeoutError:
            self._server.kill()

    def close(self) -> None:
        """End the server, at once unless it was drained. Idempotent."""
        self._server.close()
        self._end()

    def _end(self) -> None:
        self._parent.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class EngineReplica:
    """One engine replica. Serve calls its methods."""

    def __init__(self, settings_json: str) -> None:
        settings = ServerSettings.model_validate_json(settings_json)
        self._name = serve.get_replica_context().replica_id.unique_id
        self._server = OwnServer(settings)
        self._proxy = EngineProxy(self._server.base_url, self._name, settings)
        self._node = ray.get_runtime_context().get_node_id()
        self._about: About | None = None

    async def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        """Pass a request to the engine. Serve cancels this when the client leaves, which aborts the request."""
        answer = self._proxy.answer(request)
        async with contextlib.aclosing(answer):
            async for part in answer:
                yield part

    async def load(self, headers: Headers) -> Load | ApiError:
        """Return the engine's load for a client, or its refusal, because Serve would wrap a raised error."""
        try:
            return await self._proxy.load_for(headers)
        except ApiError as exc:
            return exc

    async def record_routing_stats(self) -> dict[str, Any]:
        """Report the load to the routers, and whether the engine takes requests."""
        if await self._proxy.why_not_serving() is not None:
            return {"accepting": False}
        load = None
        with contextlib.suppress(PartnerError):
            if self._about is None:
                self._about = await self._proxy.peer.about()
            load = await self._proxy.load()
        live, replay = self._server.kv_endpoints
        events = {"node": self._node, "live": live, "replay": replay}
        if live and self._about is not None:
            events["page_size"] = self._about.limits.page_size
        # Plain data, because Serve's controller passes it on without importing the engine.
        return {"accepting": True, "load": None if load is None else msgspec.to_builtins(load), "events": events}

    async def about(self) -> About | ApiError:
        """Return the engine's settings and limits, with which a front reads prompts, or the refusal."""
        try:
            return await self._proxy.peer.about()
        except PartnerError as exc:
            return ApiError.unavailable(f"the engine of replica {self._name} {exc}")

    async def check_health(self) -> None:
        """Raise ProcessDiedError when the engine does not serve: Serve then starts another replica."""
        if await self._proxy.why_not_serving() is not None:
            raise ProcessDiedError("engine", "its /health does not answer 200; the replica's log says why")

    async def __del__(self) -> None:
        """End the engine, after Serve has waited for the live requests."""
        await self._proxy.close()
        await asyncio.to_thread(self._server.drain)
        self._server.close()


ENGINES: Final = "engine"
FRONTS: Final = "front"
# A front only waits for engines, which bound the requests, so it needs no bound of its own.
_FRONT_REQUESTS: Final = 65_536
# Calls in addition to an engine's requests: short ones, and requests that the engine refuses.
_OTHER_CALLS: Final = 256
_PROBE_TIMEOUT_S: Final = 15.0
# Time for a replica to end after its live requests.
_END_S: Final = 20.0
_SEED: Final = 1

logger = logging.getLogger(__name__)


def application_of(arguments: Mapping[str, Any]) -> serve.Application:
    """Build the application from arguments over the environment. Raises ConfigError."""
    settings, options = read_options(arguments)
    settings_json = settings.model_dump_json(context=REVEAL_KEYS)
    engines = serve.deployment(**_of_engines(settings, options))(EngineReplica).bind(settings_json)
    fronts = serve.deployment(
        name=FRONTS,
        num_replicas=options.fronts,
        max_ongoing_requests=_FRONT_REQUESTS,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(_FrontReplica))
    return fronts.bind(engines, settings_json, options.chunk_bytes)


def _of_engines(settings: ServerSettings, options: AppOptions) -> dict[str, Any]:
    capacity = settings.max_running_requests + settings.max_queued_requests
    router: dict[str, Any] = {
        "request_router_class": PrefixRequestRouter,
        "request_router_kwargs": {
            "capacity": capacity,
            "index_chunks": options.index_chunks,
            "balance_percent": options.balance_percent,
            "balance_slack": options.balance_slack,
            "seed": _SEED,
        },
        "request_routing_stats_period_s": options.load_period_s,
        "request_routing_stats_timeout_s": _PROBE_TIMEOUT_S,
    }
    how_many: dict[str, Any] = {"num_replicas": options.replicas}
    if options.autoscaling_config is not None:
        how_many = {"autoscaling_config": options.autoscaling_config}
    return {
        "name": ENGINES,
        **how_many,
        "max_ongoing_requests": capacity + _OTHER_CALLS,
        "ray_actor_options": {"num_cpus": options.cpus, "num_gpus": options.gpus},
        "health_check_period_s": options.health_period_s,
        "health_check_timeout_s": _PROBE_TIMEOUT_S,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": settings.drain_timeout_s + _END_S,
        "request_router_config": RequestRouterConfig(**router),
    }


class RayEngines:
    """The engines behind Serve's handle of their deployment."""

    def __init__(self, handle: DeploymentHandle[Any]) -> None:
        self._handle = handle
        self._streaming = handle.options(stream=True)

    async def ask(self, request: PassedRequest) -> AsyncIterator[Head | bytes]:
        answer: Any = self._streaming.ask.remote(request)
        try:
            async for part in answer:
                yield part
        except RayActorError as exc:
            raise ReplicaLostError("its replica is gone") from exc
        except (BackPressureError, DeploymentUnavailableError) as exc:
            raise ApiError.unavailable(f"Serve has no engine for the request: {exc}") from exc
        finally:
            # Aborts the request when the client has left; changes nothing once the answer is complete.
            answer.cancel()

    async def about(self) -> About:
        """Return the settings and limits, which are the same for all engines. Raises ApiError."""
        # In a context of its own: Serve gives all calls of a client's request one id. Of two that wait for a replica at
        # once its router never serves the second, which counts as a request of its replica for good.
        answer: About | ApiError = await contextvars.Context().run(self._handle.about.remote)
        if isinstance(answer, ApiError):
            raise answer
        return answer

    async def loads(self, headers: Headers) -> list[Load]:
        """Ask every replica for its load, skipping those that do not answer. Raises ApiError if all refuse."""
        answers = await self._handle.broadcast("load", headers).results_async(return_exceptions=True)
        loads = [answer for answer in answers if isinstance(answer, Load)]
        refused = next((answer for answer in answers if isinstance(answer, ApiError)), None)
        if refused is not None and not loads:
            raise refused
        return loads


class _FrontReplica:
    """One front replica. Serve asks it for its ASGI application after its construction."""

    def __init__(self, engines: DeploymentHandle[Any], settings_json: str, chunk_bytes: int) -> None:
        self._engines = RayEngines(engines)
        self._settings = ServerSettings.model_validate_json(settings_json)
        self._chunk_bytes = chunk_bytes
        self._reader = PromptReader()
        self._learning: asyncio.Task[None] | None = None

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return front_app(self._engines, self._settings, self._prompt_of)

    async def _prompt_of(self, path: str, body: bytes) -> Prompt:
        """Read the prompt in a body: as token ids if the model's files are available here, else as text."""
        if self._learning is None:
            self._learning = asyncio.create_task(self._learn())
        prompt = await self._reader.prompt_of(path, body)
        return prompt if prompt.ids else prompt_in(path, body, self._chunk_bytes)

    async def _learn(self) -> None:
        try:
            about = await self._engines.about()
            await self._reader.learn(ServerSettings.model_validate(about.settings), about.limits)
        except (ApiError, RayError):
            self._learning = None
        except EngineError as exc:
            logger.warning("prompts are compared as text, because the model is not available here: %s", exc)
