"""Replies in one piece: errors and small JSON bodies."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec
from fastapi import Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from engine.frontend.http.request_log import REQUEST_ID_HEADER, current_record
from engine.frontend.protocols.anthropic import MessagesError
from engine.frontend.schema.errors import ApiError, ErrorBody, ErrorType

# Within a second a request or two will have ended, so a client that found the queue full may retry.
RETRY_AFTER_S = "1"
JSON_TYPE = "application/json"


def error_answer(
    error: ApiError, path: str, *, request_id: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """Return the reply to a refused or failed request to ``path``, and note the error for its log line.

    ``request_id`` is for callers outside the request's record.
    """
    record = current_record()
    if record is not None:
        record.error = error.body.error.message
        request_id = record.request_id
    own = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": RETRY_AFTER_S}}.get(error.status, {})
    own |= {} if request_id is None else {REQUEST_ID_HEADER: request_id}
    body = error_of_route(path, error.body_for(request_id))
    return json_answer(body, status=error.status, headers={**(headers or {}), **own})


def error_handlers(
    answer: Callable[[Request, ApiError, Mapping[str, str] | None], Response],
    bug: str,
    remedy_of: Callable[[Request, HTTPException], str] = lambda *_: "",
) -> dict[Any, Callable[..., Awaitable[Response]]]:
    """Build the exception handlers. ``answer`` replies to an ApiError; ``bug`` is the message for all other exceptions.

    An exception's own text goes only to the log, because it may contain secrets. ``remedy_of`` completes routing
    errors.
    """

    async def of_error(request: Request, exc: ApiError) -> Response:
        return answer(request, exc, None)

    async def of_leaving(_: Request, __: ClientDisconnect) -> Response:
        # The client left while it was sending the body. No reply can reach it, and there is nothing to report.
        return Response()

    async def of_route(request: Request, exc: HTTPException) -> Response:
        kind = ErrorType.NOT_FOUND if exc.status_code == 404 else ErrorType.INVALID
        words = f"{request.method} {request.url.path}: {exc.detail}{remedy_of(request, exc)}"
        return answer(request, ApiError(kind, words, status=exc.status_code), exc.headers)

    async def of_bug(request: Request, exc: Exception) -> Response:
        return answer(request, ApiError(ErrorType.ENGINE, bug.format(type(exc).__name__)), None)

    return {ApiError: of_error, ClientDisconnect: of_leaving, HTTPException: of_route, Exception: of_bug}


def error_of_route(path: str, error: ErrorBody) -> ErrorBody | MessagesError:
    """Return an error in the format of a route's protocol."""
    return MessagesError.of(error) if f"{path}/".startswith("/v1/messages/") else error


def json_answer(
    data: msgspec.Struct | Sequence[msgspec.Struct], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(data), status, headers, JSON_TYPE)
