"""The HTTP application: all routes, one shape of errors, and the OpenAPI description.

Owns the rules for all routes; each route's behaviour is in its own file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.routing import APIRoute
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from engine import __version__
from engine.frontend.http.auth import Access, HostCheck
from engine.frontend.http.body_reader import BodyReader
from engine.frontend.http.description import Description
from engine.frontend.http.engine_client import EngineClient
from engine.frontend.http.forked_work import BodyWork, LongBodies
from engine.frontend.http.grammar_check import GrammarCheck, grammar_works
from engine.frontend.http.metrics import Metrics
from engine.frontend.http.request_log import REQUEST_ID_HEADER, RequestLog, request_id_of
from engine.frontend.http.responses import error_answer, error_handlers
from engine.frontend.http.routes.administration import add_administration
from engine.frontend.http.routes.generation import GenerationRoutes, order_works
from engine.frontend.http.routes.information import ServerState, add_health, add_information, add_models
from engine.frontend.http.routes.tokens import add_tokenization, token_works
from engine.frontend.schema.errors import ApiError
from engine.frontend.sessions.prefill_bodies import PREFILL
from engine.frontend.sessions.requests import ServedModel
from engine.process.clock import MonotonicClock
from engine.process.settings import ServerSettings

# Paths of vLLM, SGLang, llama.cpp and Ollama, and the equivalent paths here.
_ELSEWHERE = {
    "/get_model_info": "/model_info",
    "/get_server_info": "/server_info",
    "/ping": "/health",
    "/health_generate": "/health",
    "/load": "/get_load",
    "/reset_prefix_cache": "/flush_cache",
    "/pause": "/pause_generation",
    "/resume": "/continue_generation",
    "/wake_up": "/wake",
    "/is_sleeping": "/server_info",
    "/release_memory_occupation": "/sleep",
    "/resume_memory_occupation": "/wake",
    "/update_weights": "/update_weights_from_disk",
    "/load_lora_adapter": "/v1/load_lora_adapter",
    "/unload_lora_adapter": "/v1/unload_lora_adapter",
    "/invocations": "/v1/chat/completions",
    "/api/chat": "/v1/chat/completions",
    "/api/generate": "/v1/completions",
    "/completion": "/v1/completions",
    "/api/tags": "/v1/models",
}


def build_app(
    settings: ServerSettings,
    served: ServedModel,
    client: EngineClient,
    access: Access,
    long_bodies: LongBodies,
    state: ServerState,
) -> FastAPI:
    """Build the application over an engine. ``long_bodies`` must know ``body_works``."""
    # The page at /docs carries its scripts, so it also works without access to the internet.
    app = FastAPIOffline(title="Lockstep", version=__version__, description="An LLM serving engine.", redoc_url=None)
    description, clock = Description(), MonotonicClock()
    asking = client.prefill_client
    metrics = Metrics(served.model_name, clock, None if asking is None else asking.prefills.counts)
    if asking is not None:
        asking.observe = metrics.prefill.observe
    bodies = BodyReader(settings.max_body_bytes)
    grammars = GrammarCheck(served.limits, long_bodies, clock, metrics.grammar_check.observe)
    add_health(app, client, state, description)
    clients = APIRouter(dependencies=[Depends(access.admit_client)])
    generation = GenerationRoutes(served, client, bodies, long_bodies, grammars, metrics)
    generation.add_to(clients, description)
    add_models(clients, served, state, description)
    add_tokenization(clients, served, bodies, long_bodies, description)
    add_information(clients, settings, served, client, metrics, state, description)
    operators = APIRouter(dependencies=[Depends(access.admit_operation)])
    add_administration(operators, settings, client, state, description)
    if settings.role == "prefill":
        generation.add_to(operators, description, [PREFILL])
    _add_heads(app.router, clients)
    for router in (clients, operators):
        app.include_router(router)
    _add_error_answers(
        app, {route.path for part in (app, clients, operators) for route in part.routes if isinstance(route, Route)}
    )
    description.install(app)
    _add_cors(app, f"{settings.cors_origins},{settings.operator_origins}")
    if access.loopback:
        app.add_middleware(HostCheck, hosts=settings.hosts)
    app.add_middleware(RequestLog, clock=clock)
    return app


def _add_heads(*routers: APIRouter) -> None:
    """Answer HEAD on every GET route; the connection omits the body."""
    for router in routers:
        for route in [
            route for route in router.routes if isinstance(route, APIRoute) and "GET" in (route.methods or ())
        ]:
            router.add_api_route(
                route.path, route.endpoint, methods=["HEAD"], response_class=Response, include_in_schema=False
            )


def body_works(served: ServedModel) -> dict[str, BodyWork]:
    """Map each kind of body or check to the function that a worker process runs on it."""
    return order_works(served) | token_works(served) | grammar_works()


def _add_cors(app: FastAPI, listed: str) -> None:
    """Let pages of the listed origins read replies. A preflight needs no key; the request after it does."""
    origins = [entry.rstrip("/") for part in listed.split(",") if (entry := part.strip())]
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=(REQUEST_ID_HEADER,),
        )


def _add_error_answers(app: FastAPI, routes: Collection[str]) -> None:
    def answer(request: Request, error: ApiError, headers: Mapping[str, str] | None) -> Response:
        # The middleware that adds the id has already returned when the reply to a bug is made.
        request_id = request_id_of(request.scope)
        return error_answer(error, request.url.path, request_id=request_id, headers=headers)

    def remedy_of(request: Request, exc: HTTPException) -> str:
        """Suggest a route: clients omit or repeat the version in their base URL, or use another server's path."""
        path = request.url.path
        if exc.status_code == 404:
            meant = [one for one in (f"/v1{path}", path.removeprefix("/v1"), _ELSEWHERE.get(path)) if one in routes]
            return f"; did you mean {meant[0]!r}?" if meant else "; /docs lists the routes"
        if exc.status_code == 405 and exc.headers is not None:
            return f"; it takes {exc.headers.get('Allow', 'another method')}"
        return ""

    bug = "the front end failed ({}); see the server's log"
    for kind, handler in error_handlers(answer, bug, remedy_of).items():
        app.add_exception_handler(kind, handler)
