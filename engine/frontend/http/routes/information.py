"""Read-only routes: health, models, server. They reply even if the scheduler's loop does not run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec
from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CONTENT_TYPE_LATEST

from engine import __version__
from engine.core.limits import Limits
from engine.core.routing.load import Load
from engine.core.stats import EngineStats
from engine.frontend.http.description import Description
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.metrics import Metrics
from engine.frontend.http.responses import json_answer
from engine.frontend.protocols.openai.answers import ModelCard, ModelList
from engine.frontend.protocols.openai.requests import require_model
from engine.frontend.schema.errors import ApiError
from engine.frontend.schema.native import read_timeout
from engine.frontend.sessions.requests import ServedModel
from engine.process.settings import ServerSettings

INFORMATION = "information"
OPENAI = "openai"
# The loop answers between two steps, but a frozen or very busy loop must not keep an operator waiting.
STATS_TIMEOUT_S = 1.0
MAX_STATS_TIMEOUT_S = 60.0
INFO_QUERY = (("timeout", MAX_STATS_TIMEOUT_S, "seconds to wait for the scheduler's counters; 0: do not request them"),)
# Hidden in /server_info: keys, and the free text of a harness.
HIDDEN_SETTINGS = frozenset({"api_key", "admin_key", "gate_options", "stage_probe"})


@dataclass
class ServerState:
    """The mutable state of a server. ``pids`` are the engine's processes by name, known once all are ready.

    ``loras`` are the paths of the loaded LoRAs by name, from the scheduler's answers. ``created_s`` is the time of the
    start, in seconds since the epoch. ``weights`` is the path of the last update, if any. ``sleep_level`` is 0 while
    the engine is awake.
    """

    loras: dict[str, str]
    serving: bool = False
    pids: dict[str, int] = field(default_factory=dict)
    created_s: int = field(default_factory=lambda: int(time.time()))
    weights: str = ""
    sleep_level: int = 0


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The answer of ``/model_info``; sizes are in tokens."""

    model: str
    vocab_size: int
    context_length: int
    max_total_tokens: int
    eos_token_ids: tuple[int, ...]
    tool_call_parser: str
    reasoning_parser: str
    sampling_defaults: Mapping[str, float]


class VersionInfo(msgspec.Struct, frozen=True, kw_only=True):
    version: str


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The reply of ``/server_info``. ``stats`` is null if the scheduler did not answer in time.

    ``weights`` is the configured model, or the path of the last update.
    """

    version: str
    settings: dict[str, str | int | float | bool | None]
    limits: Limits
    processes: dict[str, int]
    weights: str
    open_requests: int
    open_calls: int
    stats: EngineStats | None


def add_health(app: FastAPI, client: EngineClient, state: ServerState, description: Description) -> None:
    """Add the probe, which needs no key."""

    @app.get("/health", **description.route(tag=INFORMATION))
    async def health() -> Response:
        """Report whether requests can be served: 200 or 503. Requests wait while an engine is asleep."""
        if client.sessions.closed is not None:
            raise client.sessions.closed
        if not state.serving:
            raise ApiError.unavailable("the server is starting; try again until it is ready")
        return PlainTextResponse("asleep" if state.sleep_level else "ok")


def add_models(router: APIRouter, served: ServedModel, state: ServerState, description: Description) -> None:
    """Add the OpenAI protocol's routes that list the served models."""

    def card(lora: str | None = None) -> ModelCard:
        return ModelCard(
            id=lora or served.model_name,
            created=state.created_s,
            max_model_len=served.limits.context_length,
            parent=msgspec.UNSET if lora is None else served.model_name,
        )

    @router.get("/v1/models", **description.route(answer=ModelList, tag=OPENAI))
    async def models() -> Response:
        """List the served model and its LoRAs."""
        return json_answer(ModelList(data=[card(), *map(card, state.loras)]))

    @router.get("/v1/models/{model:path}", **description.route(answer=ModelCard, errors=(404,), tag=OPENAI))
    async def model_card(model: str) -> Response:
        """Describe the served model, or one of its LoRAs."""
        if model in state.loras:
            return json_answer(card(model))
        require_model(model, served.model_name)
        return json_answer(card())


def add_information(
    router: APIRouter,
    settings: ServerSettings,
    served: ServedModel,
    client: EngineClient,
    metrics: Metrics,
    state: ServerState,
    description: Description,
) -> None:
    _add_model(router, settings, served, description)
    _add_server(router, settings, served, client, state, description)
    _add_counters(router, settings, served, client, metrics, description)


def _add_model(router: APIRouter, settings: ServerSettings, served: ServedModel, description: Description) -> None:
    @router.get("/version", **description.route(answer=VersionInfo, tag=INFORMATION))
    async def version() -> Response:
        """Return the version of the engine."""
        return json_answer(VersionInfo(version=__version__))

    @router.get("/model_info", **description.route(answer=ModelInfo, tag=INFORMATION))
    async def model_info() -> Response:
        """Describe the model."""
        limits = served.limits
        return json_answer(
            ModelInfo(
                model=settings.model,
                vocab_size=limits.vocab_size,
                context_length=limits.context_length,
                max_total_tokens=limits.total_pages * limits.page_size,
                eos_token_ids=limits.eos_token_ids,
                **served.dialect.about(),
                sampling_defaults=served.sampling_defaults,
            )
        )


def _add_server(
    router: APIRouter,
    settings: ServerSettings,
    served: ServedModel,
    client: EngineClient,
    state: ServerState,
    description: Description,
) -> None:
    @router.get(
        "/server_info", **description.route(query=INFO_QUERY, answer=ServerInfo, errors=(400,), tag=INFORMATION)
    )
    async def server_info(request: Request) -> Response:
        """Describe the server: settings without secrets, processes, counters."""
        asked_s = read_timeout(request.query_params, MAX_STATS_TIMEOUT_S)
        timeout_s = STATS_TIMEOUT_S if asked_s is None else asked_s
        open_calls = client.open_calls  # Read before this route makes its own call for the stats.
        return json_answer(
            ServerInfo(
                version=__version__,
                settings=settings.model_dump(mode="json", exclude=set(HIDDEN_SETTINGS)),
                limits=served.limits,
                processes=state.pids,
                weights=state.weights or settings.model,
                open_requests=client.sessions.open_requests,
                open_calls=open_calls,
                stats=await client.stats(timeout_s) if timeout_s else None,
            )
        )


def _add_counters(
    router: APIRouter,
    settings: ServerSettings,
    served: ServedModel,
    client: EngineClient,
    metrics: Metrics,
    description: Description,
) -> None:
    origin = served.limits.kv_origin

    @router.get("/get_load", **description.route(answer=Load, is_list=True, tag=INFORMATION))
    async def get_load() -> Response:
        """Report the load to a router: SGLang's fields, in a list with one entry. 503 if the scheduler is silent."""
        stats = await client.stats(STATS_TIMEOUT_S)
        if stats is None:
            raise ApiError.unavailable(f"the scheduler did not answer within {STATS_TIMEOUT_S:g} s; try again")
        return json_answer([Load.of(stats, role=settings.role, version=__version__, kv_origin=origin)])

    @router.get("/metrics", **description.route(tag=INFORMATION))
    async def prometheus() -> Response:
        """Return the metrics for Prometheus; complete only while the scheduler answers."""
        text = metrics.text(await client.stats(STATS_TIMEOUT_S))
        return Response(text, media_type=CONTENT_TYPE_LATEST)
