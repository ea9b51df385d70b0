"""The HTTP application: every route, the one shape of errors, and the description of it all.

Owns what is true for all routes; what a single route does stands with that route.
"""

from __future__ import annotations

from fastapi import APIRouter, Depends, FastAPI, Request, Response
from starlette.exceptions import HTTPException

from engine import __version__
from engine.frontend.context import FrontEnd
from engine.frontend.description import Description
from engine.frontend.errors import ApiError, ProblemType
from engine.frontend.responses import json_answer
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
    operators = APIRouter(dependencies=[Depends(front.doors.admit_operator)])
    add_administration(operators, front, description)
    for router in (clients, operators):
        app.include_router(router)
    description.install(app)
    return app


def _add_error_answers(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def answer_api_error(_: Request, exc: ApiError) -> Response:
        headers = {"www-authenticate": "Bearer"} if exc.status == 401 else None
        return json_answer(exc.body, status=exc.status, headers=headers)

    @app.exception_handler(HTTPException)
    async def answer_http_exception(request: Request, exc: HTTPException) -> Response:
        kind = ProblemType.NOT_FOUND if exc.status_code == 404 else ProblemType.INVALID
        problem = ApiError(exc.status_code, kind, f"{request.method} {request.url.path}: {exc.detail}")
        return json_answer(problem.body, status=exc.status_code, headers=exc.headers)

    @app.exception_handler(Exception)
    async def answer_bug(_: Request, exc: Exception) -> Response:
        problem = ApiError(500, ProblemType.ENGINE, f"the front end failed: {type(exc).__name__}: {exc}")
        return json_answer(problem.body, status=500)
