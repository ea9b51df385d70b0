"""Answers that are sent at once: errors, and small bodies of JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from fastapi import Response

from engine.frontend.anthropic import MessagesError
from engine.frontend.errors import ApiError, ErrorBody
from engine.frontend.request_log import REQUEST_ID_HEADER, current_record

# When a client that found the queue full may ask again: by then a request or two have ended.
RETRY_AFTER_S = "1"
JSON_TYPE = "application/json"


def error_answer(
    error: ApiError, path: str, *, request_id: str | None = None, headers: Mapping[str, str] | None = None
) -> Response:
    """The answer to a request of ``path`` that is refused or failed, and what its line in the log says.

    ``request_id`` is for what answers outside of the request's record.
    """
    record = current_record()
    if record is not None:
        record.error = error.body.error.message
        request_id = record.request_id
    own = {401: {"www-authenticate": "Bearer"}, 429: {"retry-after": RETRY_AFTER_S}}.get(error.status, {})
    own |= {} if request_id is None else {REQUEST_ID_HEADER: request_id}
    body = error_of_route(path, error.body_for(request_id))
    return json_answer(body, status=error.status, headers={**(headers or {}), **own})


def error_of_route(path: str, error: ErrorBody) -> ErrorBody | MessagesError:
    """An error as the protocol of a route has it."""
    return MessagesError.of(error) if f"{path}/".startswith("/v1/messages/") else error


def json_answer(
    data: msgspec.Struct | Sequence[msgspec.Struct], *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    return Response(msgspec.json.encode(data), status, headers, JSON_TYPE)
