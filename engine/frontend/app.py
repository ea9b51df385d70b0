"""The HTTP application: every route, the one shape of errors, and the description of it all.

Owns what is true for all routes; what a single route does stands with that route.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine import __version__
from engine.frontend.context import FrontEnd
from engine.frontend.description import Description
from engine.frontend.errors import ApiError, ProblemType
from engine.frontend.host_check import HostCheck
from engine.frontend.responses import error_answer, json_answer
from engine.frontend.routes.administration import add_administration
from engine.frontend.routes.generation import add_generation, add_models
from engine.frontend.routes.information import add_health, add_information

__all__ = ["build_app"]


def build_app(front: FrontEnd) -> FastAPI:
    """The application over an engine's front end."""
    app = FastAPI(title="Lockstep", version=__version__, description="An LLM serving engine.")
    description = Description()
    _add_error_answers(app)
    add_health(app, front, description)
    clients = APIRouter(dependencies=[Depends(front.doors.admit_client)])
    add_generation(clients, front, description)
    add_models(clients, front, description)
    add_information(clients, front, description)
    operators = APIRouter(dependencies=[Depends(front.origins.admit), Depends(front.doors.admit_operator)])
    add_administration(operators, front, description)
    for router in (clients, operators):
        app.include_router(router)
    description.install(app)
    if front.doors.loopback:
        app.add_middleware(HostCheck, hosts=front.settings.hosts)
    return app


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def answer_api_error(_: Request, exc: ApiError) -> Response:
        return error_answer(exc)

    @app.exception_handler(ClientDisconnect)
    async def answer_nobody(_: Request, __: ClientDisconnect) -> Response:
        # Its client left while it sent the body. There is nobody to answer, and nothing to report.
        return Response()

    @app.exception_handler(HTTPException)
    async def answer_http_exception(request: Request, exc: HTTPException) -> Response:
        kind = ProblemType.NOT_FOUND if exc.status_code == 404 else ProblemType.INVALID
        problem = ApiError(exc.status_code, kind, f"{request.method} {request.url.path}: {exc.detail}")
        return json_answer(problem.body, status=exc.status_code, headers=exc.headers)

    @app.exception_handler(Exception)
    async def answer_bug(_: Request, exc: Exception) -> Response:
        # The text of an exception may hold what no client should see. The log has all of it.
        return error_answer(
            ApiError(500, ProblemType.ENGINE, f"the front end failed ({type(exc).__name__}); the server's log says how")
        )
